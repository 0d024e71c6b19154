"""Stage `forward`: hidden states per layer and logits on fixed inputs, with the adapter on, off and merged.

Each is compared with the same model run in float64 on the CPU: a device passes when its largest error is at most twice
the CPU's own in the same dtype, plus the final store; where few rows carry the CPU's error, `rules.error_factor` times
instead of twice. A user's tolerance replaces that rule, element by element. Merged and unmerged adapters are the same
function in exact arithmetic, so one float64 pass serves both.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from consistency.capture.names import ADAPTER_MERGED as MERGED
from consistency.capture.names import ADAPTER_OFF as OFF
from consistency.capture.names import ADAPTER_ON as ON
from consistency.capture.names import WHOLE_MODEL
from consistency.capture.records import RecordStatus
from consistency.errors import first_line
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.exact import in_float64
from consistency.numerics.independent_errors import independent_rows
from consistency.numerics.rules import Rule
from consistency.worker import yardstick
from consistency.worker.model import half_kernels
from consistency.worker.model.float64_reference import Reference, publish, wait_for
from consistency.worker.model.id_checks import KernelAssertedError, asserted, context_is_lost
from consistency.worker.model.inputs import fixed_inputs
from consistency.worker.model.loading import load_model
from consistency.worker.model.merging import MergeRefusedError, adapted_layers, in_merged
from consistency.worker.model.running import (
    Activations,
    activations,
    is_of_the_model,
    refusal,
    tokens_of,
    unbounded,
)
from consistency.worker.stages.context import Context
from consistency.worker.stages.input_checks import inputs_fit
from consistency.worker.stages.relative_rule import own_errors, record_relative


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
    """

    outputs: dict[str, Activations] = field(default_factory=dict)
    digests: dict[tuple[str, str], list[TensorDigest]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    computed_by: str = ""


@dataclass(frozen=True, slots=True)
class Exact:
    """Float64 activations by mode and name, and why a mode has none; `others` are the CPU's with other products."""

    outputs: Activations = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    others: dict[str, Activations] = field(default_factory=dict)


def run(context: Context) -> None:
    """Record every hidden state and the logits in every mode."""
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    reason = reason or unbounded(context.base.model)
    if inputs is None or reason:
        _not_run(context, _modes(context), "skipped", reason)
        return
    if not inputs_fit(context, "forward", inputs):
        _not_run(context, _modes(context), "skipped", "ids or labels are past the end of a table")
        return
    exact = Exact()
    if not context.job.makes_reference:
        found = _pass(context, context.model, inputs, exact=None)
        answer = wait_for(context.scratch, context.events)
    elif context.device.type == "cpu":
        found = _pass(context, context.model, inputs, exact=exact)
        answer = _publish(context, found, exact)
    else:
        found = _pass(context, context.model, inputs, exact=None)
        with context.events.on_cpu():
            on_cpu = _pass(context, load_model(context.job.case, "cpu"), inputs, exact=exact)
            answer = _publish(context, on_cpu, exact)
    for mode, reason in found.refused.items():
        _not_run(context, [mode], "skipped", reason)
    if isinstance(answer, str):
        _not_run(context, list(found.outputs), "blocked", answer)
        return
    for mode, outputs in found.outputs.items():
        for name, tensor in outputs.items():
            if context.record.wants("forward", name):
                record_relative(
                    context, "forward", name, mode, actual=tensor, digests=found.digests[mode, name], reference=answer,
                    name=f"{mode}::{name}", exact_name=_exact(f"{mode}::{name}"), mode=_exact(mode),
                    computed_by=found.computed_by,
                )  # fmt: skip


def _pass(context: Context, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *, exact: Exact | None) -> Passes:
    """Run a model in every mode, merged last; fill `exact` with float64 activations where it is given."""
    kernels = half_kernels.replacement(model, tokens_of(inputs))
    found = Passes(computed_by=half_kernels.described(kernels))
    modes = _modes(context)
    for done, mode in enumerate(modes):
        run = functools.partial(in_mode, model, inputs, mode, has_adapter=ON in modes)
        try:
            for _ in range(context.job.case.repeat):
                context.events.step(mode, done, len(modes))
                with half_kernels.computing(kernels):
                    outputs = run()
                for name, tensor in outputs.items():
                    found.digests.setdefault((mode, name), []).append(digest(tensor))
                found.outputs.setdefault(mode, outputs)
        except MergeRefusedError as refused:
            found.refused[mode] = f"PEFT does not merge this adapter: {refused}"
            continue
        except Exception as error:  # model code of any kind may raise anything
            if context_is_lost(error):
                raise KernelAssertedError(asserted(inputs, context.device, error)) from error
            if not is_of_the_model(error, model):
                raise
            found.refused[mode] = refusal(context.job.case, error)
            continue
        for title, products in yardstick.others_of_run(context.job, model).items() if exact is not None else ():
            assert exact is not None
            context.events.step(f"{mode}, {title}", done, len(modes))
            with yardstick.computing_with(products):
                found_with = run()
            exact.others.setdefault(title, {}).update((f"{mode}::{name}", t) for name, t in found_with.items())
        if exact is not None and mode != MERGED:
            context.events.step(f"{mode}, float64", done, len(modes))
            try:
                truth = in_float64(run)
            except Exception as error:  # code that insists on its own dtype
                if not is_of_the_model(error, model):
                    raise
                exact.failures[mode] = first_line(error)
                continue
            exact.outputs.update((f"{mode}::{name}", tensor.to(torch.float64)) for name, tensor in truth.items())
    return found


def _publish(context: Context, found: Passes, exact: Exact) -> Reference:
    on_cpu = {f"{mode}::{name}": tensor for mode, outputs in found.outputs.items() for name, tensor in outputs.items()}
    tables = own_errors(
        on_cpu, on_cpu.get, lambda name: exact.outputs.get(_exact(name)), samples=independent_rows,
        failures=exact.failures, known=exact.outputs, computed_by=found.computed_by,
        others={title: tensors.get for title, tensors in exact.others.items()},
    )  # fmt: skip
    return publish(context.scratch, exact.outputs, tables)


def _modes(context: Context) -> list[str]:
    if context.job.case.adapter is None:
        return [OFF]
    return [ON, OFF, MERGED] if any(True for _ in adapted_layers(context.model)) else [ON, OFF]


def in_mode(model: Any, inputs: Activations, mode: str, *, has_adapter: bool) -> Activations:
    """Run the model once in a mode."""
    if mode == MERGED:
        return in_merged(model, lambda: activations(model, inputs))
    with model.disable_adapter() if mode == OFF and has_adapter else nullcontext():
        return activations(model, inputs)


def _exact(name: str) -> str:
    """Return the mode, or the mode and name, of the float64 pass that serves it."""
    return ON + name.removeprefix(MERGED) if name.startswith(MERGED) else name


def _not_run(context: Context, modes: list[str], status: RecordStatus, reason: str) -> None:
    for mode in modes:
        context.record.absent("forward", WHOLE_MODEL, mode, status=status, reason=reason, rule=Rule.RELATIVE)
