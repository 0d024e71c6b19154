"""Stage `forward`: hidden states per layer and logits on fixed inputs, with the adapter on, off and merged.

Each is compared with the same model run in float64 on the CPU: a device passes when its largest error is at most about
twice the one that rounding makes in the same dtype (`worker/cpu_error.py`), plus the final store. A user's tolerance
replaces that rule, element by element. Merged and unmerged adapters are the same function in exact arithmetic, so one
float64 pass serves both. A large model runs a few of the sequences alone without its adapter: the same weights are
multiplied by the same kernels with it, so what is left to see is whether it is off.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from consistency.capture.names import ADAPTER_MERGED as MERGED
from consistency.capture.names import ADAPTER_OFF as OFF
from consistency.capture.names import ADAPTER_ON as ON
from consistency.capture.names import SEQUENCES, WHOLE_MODEL
from consistency.capture.records import RecordStatus
from consistency.case.case import Case
from consistency.case.inference.request import OUTPUT
from consistency.devices.backends import CPU
from consistency.errors import first_line
from consistency.numerics.decisions import Watch
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.exact import in_float64
from consistency.numerics.independent_errors import independent_rows
from consistency.numerics.rounded_products import RoundedProducts
from consistency.numerics.rules import Rule
from consistency.worker import cpu_error
from consistency.worker.decisions.places import Places
from consistency.worker.decisions.replay import Made, Replay, deciding
from consistency.worker.decisions.track import Table, Track
from consistency.worker.model import half_kernels
from consistency.worker.model.disabling import DisableRefusedError, disabled
from consistency.worker.model.float64_reference import Reference, Tables, publish, wait_for
from consistency.worker.model.id_checks import KernelAssertedError, asserted, context_is_lost
from consistency.worker.model.inputs import first_sequences, fixed_inputs
from consistency.worker.model.loading import load_model
from consistency.worker.model.merging import MergeRefusedError, adapted_layers, in_merged
from consistency.worker.model.running import (
    Activations,
    activations,
    is_of_the_model,
    matrix_elements,
    refusal,
    tokens_of,
)
from consistency.worker.precision import products_of
from consistency.worker.protocol import DECISIONS_FILE, REFERENCE_FILE
from consistency.worker.quantized.exact import exact_layers
from consistency.worker.stages.context import Context
from consistency.worker.stages.decision_flips import NOT_REPLAYED, ON_TRACK, record_flips
from consistency.worker.stages.input_checks import inputs_fit
from consistency.worker.stages.merge_effect import record_merge_effect
from consistency.worker.stages.relative_rule import Read, record_relative, rounding_errors


@dataclass(frozen=True, slots=True)
class Passes:
    """The results of the forward passes of one model, by mode.

    Attributes
    ----------
    outputs : dict of str to dict
        Activations on the CPU by mode and name, from the first run.
    digests : dict
        One digest per run, by mode and name.
    refused : dict of str to str
        Why a mode has none: PEFT does not merge the adapter, or the model does not run on the inputs.
    computed_by : str
        How they were computed, where not by the device's own kernels.
    made : Made
        The decisions in them.
    on_track : dict
        Activations that were computed again with the decisions of the reference, by mode and name.
    """

    outputs: dict[str, Activations] = field(default_factory=dict)
    digests: dict[tuple[str, str], list[TensorDigest]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    computed_by: str = ""
    made: Made = field(default_factory=Made)
    on_track: dict[str, Activations] = field(default_factory=dict)

    def judged(self, mode: str) -> Activations:
        """Return the activations to judge."""
        return self.on_track.get(mode, self.outputs[mode])


@dataclass(frozen=True, slots=True)
class Exact:
    """Float64 activations by mode and name, and why a mode has none.

    `drawn` are passes with noise, by the name of their products and by mode. All are on one track of decisions.
    """

    track: Track
    outputs: Activations = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    drawn: dict[str, dict[str, list[Activations]]] = field(default_factory=dict)

    def passes(self) -> dict[str, list[Read]]:
        """Return what reads the tensors of each pass with noise by mode and name, by the name of the products."""

        def read(mode: str, drawn: Activations, name: str) -> torch.Tensor | None:
            return drawn.get(name.removeprefix(f"{mode}::")) if name.startswith(f"{mode}::") else None

        return {
            title: [functools.partial(read, mode, one) for mode, drawn in modes.items() for one in drawn]
            for title, modes in self.drawn.items()
        }


def run(context: Context) -> None:
    """Record every hidden state and the logits in every mode."""
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    if inputs is None or reason:
        _not_run(context, _modes(context), "skipped", reason)
        return
    if not inputs_fit(context, "forward", inputs):
        _not_run(context, _modes(context), "skipped", "ids or labels are past the end of a table")
        return
    if not context.job.makes_reference:
        found = _pass(context, context.model, inputs, exact=None)
        answer = wait_for(context.scratch, context.events)
    elif context.device.type == "cpu":
        exact = _reference(context, context.model)
        found = _pass(context, context.model, inputs, exact=exact)
        answer = _publish(context, found, exact)
        _merge_effect(context, context.model, inputs, found, exact)
        _engines(context, context.model, inputs, exact)
        record_flips(context, "forward", exact.track.flips)
    else:
        found = _pass(context, context.model, inputs, exact=None)
        with context.events.on_cpu():
            twin = load_model(context.job.case, "cpu")
            exact = _reference(context, twin)
            on_cpu = _pass(context, twin, inputs, exact=exact)
            answer = _publish(context, on_cpu, exact)
            _merge_effect(context, twin, inputs, on_cpu, exact)
            _engines(context, twin, inputs, exact)
            del twin
    for mode, reason in found.refused.items():
        _not_run(context, [mode], "skipped", reason)
    if isinstance(answer, str):
        _not_run(context, list(found.outputs), "blocked", answer)
        return
    makes = context.job.makes_reference and context.device.type == "cpu"
    for mode in found.outputs:
        why = "" if makes or answer.tables.failures.get(_exact(mode)) else _on_track(context, found, inputs, mode)
        decisions = ON_TRACK if mode in found.on_track else ""
        given = inputs_of(context.job.case, context.model, inputs, mode)
        fewer = {} if given is inputs else {SEQUENCES: f"{_sequences(given)} of {_sequences(inputs)}"}
        for name, tensor in found.judged(mode).items():
            if context.record.wants("forward", name):
                record_relative(
                    context, "forward", name, mode, actual=tensor, digests=found.digests[mode, name], reference=answer,
                    name=f"{mode}::{name}", exact_name=_exact(f"{mode}::{name}"), mode=_exact(mode),
                    computed_by=found.computed_by, decisions=decisions, reason=why, more=fewer,
                )  # fmt: skip


def _pass(context: Context, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *, exact: Exact | None) -> Passes:
    """Run a model in every mode, merged last; fill `exact` with float64 activations where it is given."""
    kernels = half_kernels.replacement(model, tokens_of(inputs))
    found = Passes(computed_by=half_kernels.described(kernels))
    modes = _modes(context)
    watches = found.made.watch if exact is None else exact.track.own
    for done, mode in enumerate(modes):
        given = inputs_of(context.job.case, model, inputs, mode)
        run = functools.partial(in_mode, model, given, mode, has_adapter=ON in modes)
        try:
            for repeat in range(context.job.case.repeat):
                context.events.step(mode, done, len(modes))
                with half_kernels.computing(kernels):
                    outputs = run(watch=None if repeat else watches(mode))
                for name, tensor in outputs.items():
                    found.digests.setdefault((mode, name), []).append(digest(tensor))
                found.outputs.setdefault(mode, outputs)
        except MergeRefusedError as refused:
            found.refused[mode] = f"PEFT does not merge this adapter: {refused}"
        except DisableRefusedError as refused:
            found.refused[mode] = f"PEFT does not disable this adapter: {refused}"
        except Exception as error:  # model code of any kind may raise anything
            if context_is_lost(error):
                raise KernelAssertedError(asserted(inputs, context.device, error)) from error
            if not is_of_the_model(error, model):
                raise
            found.refused[mode] = refusal(context.job.case, error)
        else:
            if exact is not None:
                _draw(context, model, given, mode, exact, found, kernels)
    for done, mode in enumerate(mode for mode in found.outputs if exact is not None and mode != MERGED):
        assert exact is not None
        context.events.step(f"{mode}, float64", done, len(modes))
        given = inputs_of(context.job.case, model, inputs, mode)
        run = functools.partial(in_mode, model, given, mode, has_adapter=ON in modes)
        try:
            with exact_layers(model):
                truth = in_float64(run, watch=exact.track.exact(mode), places=exact.track.places)
        except Exception as error:  # code that insists on its own dtype
            if not is_of_the_model(error, model):
                raise
            exact.failures[mode] = first_line(error)
            continue
        exact.outputs.update((f"{mode}::{name}", tensor.to(torch.float64)) for name, tensor in truth.items())
    return found


def _draw(
    context: Context,
    model: torch.nn.Module,
    inputs: Activations,
    mode: str,
    exact: Exact,
    found: Passes,
    kernels: RoundedProducts | None,
) -> None:
    """Compute a mode with noise, on the track, after the CPU's own pass of it.

    Of a large model the merged pass is not computed again, which would merge all layers once more: what noise does to
    the unmerged one is added to it. What merging rounds is the same on every device.
    """
    has_adapter = context.job.case.adapter is not None

    def computed(title: str) -> Activations:
        with half_kernels.computing(kernels):
            return in_mode(
                model, inputs, mode, has_adapter=has_adapter, watch=exact.track.other(_exact(mode), _named(title, mode))
            )

    title = cpu_error.name_of(cpu_error.products_in(model, products_of(torch.device(CPU))))
    if mode == MERGED and not exact.track.adopt(ON, MERGED, _named(title, mode)):
        found.on_track[mode] = computed(title)
    own = found.judged(mode)

    def independent(drawn: Activations) -> dict[str, int]:
        return {name: independent_rows(drawn[name], tensor) for name, tensor in own.items()}

    passes = cpu_error.passes_for(matrix_elements(model) * tokens_of(inputs))
    if mode == MERGED and ON in found.outputs and cpu_error.is_large(passes):
        unmerged = found.judged(ON)
        for modes in exact.drawn.values():
            modes[mode] = [
                {name: own[name] + (noisy[name].double() - unmerged[name]) for name in own} for noisy in modes[ON]
            ]
        return
    for title, products in cpu_error.products_of_run(context.job, model).items():
        context.events.step(f"{mode}, {title}", 0, 1)
        drawn = cpu_error.draw(products, passes, functools.partial(computed, title), independent)
        exact.drawn.setdefault(title, {})[mode] = drawn


def _reference(context: Context, model: torch.nn.Module) -> Exact:
    return Exact(Track(_decisions(context), model, _title(model, ON)))


def _decisions(context: Context) -> Path:
    return context.scratch / DECISIONS_FILE.format("forward")


def _title(model: torch.nn.Module, mode: str, device: torch.device = torch.device(CPU)) -> str:  # noqa: B008 - a value
    """Return the name of a device's products in a mode: a merged adapter has errors of its own."""
    return _named(cpu_error.name_of(cpu_error.products_in(model, products_of(device))), mode)


def _named(products: str, mode: str) -> str:
    return f"{products}, merged" if mode == MERGED else products


def _on_track(context: Context, found: Passes, inputs: dict[str, torch.Tensor], mode: str) -> str:
    """Compute a mode again on the track if the worker decided otherwise there; return why that is not possible."""
    path, key, model = _decisions(context), _exact(mode), context.model
    if found.made.is_on(Table.of(path), mode, on=key):
        return ""
    replay = Replay(path, model, _title(model, mode, context.device))
    given = inputs_of(context.job.case, model, inputs, mode)
    try:
        with half_kernels.computing(half_kernels.replacement(model, tokens_of(inputs))):
            outputs = in_mode(
                model, given, mode, has_adapter=context.job.case.adapter is not None,
                watch=replay.watch(key), places=replay.places,
            )  # fmt: skip
    except Exception as error:  # model code of any kind may raise anything
        if not is_of_the_model(error, model):
            raise
        return NOT_REPLAYED
    record_flips(context, "forward", replay.flips, mode=mode)
    if not replay.was_complete(key):
        return NOT_REPLAYED
    found.on_track[mode] = outputs
    return ""


def _publish(context: Context, found: Passes, exact: Exact) -> Reference:
    on_cpu = {f"{mode}::{name}": tensor for mode in found.outputs for name, tensor in found.judged(mode).items()}
    exact.track.publish()
    errors = rounding_errors(on_cpu, exact.passes(), lambda name: exact.outputs.get(_exact(name)), independent_rows)
    tables = Tables(errors=errors, failures=exact.failures, names=tuple(exact.outputs), computed_by=found.computed_by)
    if context.job.others_wait:
        publish(context.scratch, exact.outputs, tables)
    return Reference(path=context.scratch / REFERENCE_FILE, tables=tables, made=exact.outputs)


def _merge_effect(context: Context, model: torch.nn.Module, inputs: Activations, found: Passes, exact: Exact) -> None:
    record_merge_effect(
        context, model, inputs, computed=found.outputs, refused=found.refused, exact=exact.outputs, track=exact.track
    )


def _engines(context: Context, model: torch.nn.Module, inputs: Activations, exact: Exact) -> None:
    if not context.job.case.engine_outputs:
        return
    from consistency.worker.stages.engine_outputs.judging import Forward, judge_engines

    own_products = cpu_error.name_of(cpu_error.products_in(model, products_of(torch.device(CPU))))
    modes = exact.drawn.get(own_products, {})
    drawn = {mode: [one[OUTPUT] for one in passes] for mode, passes in modes.items() if OUTPUT in passes[0]}
    judge_engines(
        context,
        Forward(
            model=model, inputs=inputs, drawn=drawn, failures=exact.failures, track=exact.track,
            exact={mode: t for mode in (ON, OFF) if (t := exact.outputs.get(f"{mode}::{OUTPUT}")) is not None},
        ),
    )  # fmt: skip


def _modes(context: Context) -> list[str]:
    if context.job.case.adapter is None:
        return [OFF]
    return [ON, OFF, MERGED] if any(True for _ in adapted_layers(context.model)) else [ON, OFF]


def inputs_of(case: Case, model: torch.nn.Module, inputs: Activations, mode: str) -> Activations:
    """Return the inputs of a mode: where they are made, a large model without its adapter runs the first ones alone."""
    whole = case.adapter is None or not case.makes_inputs or bool(case.engine_outputs)
    if mode != OFF or whole or matrix_elements(model) <= case.plan.float64_merges:
        return inputs
    few = first_sequences(inputs, case.plan.sequences_off)
    return few if _sequences(few) < _sequences(inputs) else inputs


def _sequences(inputs: Activations) -> int:
    return len(next(iter(inputs.values())))


def in_mode(
    model: Any,
    inputs: Activations,
    mode: str,
    *,
    has_adapter: bool,
    watch: Watch | None = None,
    places: Places | None = None,
) -> Activations:
    """Run the model once in a mode; `watch` is called with each decision, and `places` follows the modules."""

    def run() -> Activations:
        with deciding(watch, gradient=False, places=places):
            return activations(model, inputs)

    if mode == MERGED:
        return in_merged(model, run)
    with disabled(model) if mode == OFF and has_adapter else nullcontext():
        return run()


def _exact(name: str) -> str:
    """Return the mode, or the mode and name, of the float64 pass that serves it."""
    return ON + name.removeprefix(MERGED) if name.startswith(MERGED) else name


def _not_run(context: Context, modes: list[str], status: RecordStatus, reason: str) -> None:
    for mode in modes:
        context.record.absent("forward", WHOLE_MODEL, mode, status=status, reason=reason, rule=Rule.RELATIVE)
