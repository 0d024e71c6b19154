"""Stage `forward`: every block of the model on the same inputs, with the adapter on, off and merged.

A float64 pass on the CPU rounds what enters and leaves each block to the tested dtype; on these values each device
computes the blocks, and what lies between them (`worker/model/block_pass.py`). Errors neither add up nor grow from
block to block, so the module that is outside is the wrong one. Judged by the `block` rule (`numerics/error_spread.py`);
a user's tolerance replaces it, element by element. Merged and unmerged adapters are the same function in exact
arithmetic, so one float64 pass serves both. Of a large model the blocks are compared with the adapter on alone: the
same weights are multiplied by the same kernels without it, and the stage `merged` judges merged weights.

The device's own pass from end to end is shown beside it: how far its outputs are from float64, and how many of the most
likely words are others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from consistency import plugins
from consistency.capture.names import ADAPTER_MERGED as MERGED
from consistency.capture.names import ADAPTER_OFF as OFF
from consistency.capture.names import ADAPTER_ON as ON
from consistency.capture.names import ATTENTION, BY_BLOCKS, END_TO_END, LOGITS, WHOLE_MODEL
from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.case.stage import Stage
from consistency.case.stages import SPECS
from consistency.devices.backends import CPU
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.error import measure_against_exact
from consistency.numerics.exact import Float64Mode
from consistency.numerics.file_tensor import mapped
from consistency.numerics.rules import Rule
from consistency.stages.forward import passes as titles
from consistency.stages.forward.merge_effect import record_merge_effect
from consistency.worker import cpu_error
from consistency.worker.attention_kernels import AttentionKernels
from consistency.worker.context import Context, inputs_fit
from consistency.worker.decisions.replay import Replay, deciding
from consistency.worker.decisions.track import Track
from consistency.worker.judging.block_rule import (
    NOT_REPLAYED,
    computed_again,
    draw,
    limits_of,
    named_factors,
    passes_for,
    record_block,
    record_flips,
    record_given,
    record_missed,
    rows_of,
    spreads,
)
from consistency.worker.judging.outputs import ForwardOutputs, OutputJudge
from consistency.worker.model import half_kernels
from consistency.worker.model.block_pass import (
    BlockBegan,
    Given,
    ResultPlace,
    as_exact,
    no_listener,
    rounded,
    run_by_blocks,
)
from consistency.worker.model.call_trace import Saw
from consistency.worker.model.float64_reference import Reference, Tables, given_name, publish, wait_for
from consistency.worker.model.id_checks import KernelAssertedError, asserted, context_is_lost
from consistency.worker.model.inputs import first_sequences, fixed_inputs
from consistency.worker.model.loading import load_model
from consistency.worker.model.merging import DisableRefusedError, MergeRefusedError, adapted_layers, disabled, in_merged
from consistency.worker.model.running import (
    Activations,
    activations,
    is_of_the_model,
    matrix_elements,
    model_code,
    refusal,
    tokens_of,
)
from consistency.worker.protocol import DECISIONS_FILE, REFERENCE_FILE
from consistency.worker.quantized.exact import exact_layers
from consistency.worker.recorder import Skip

T = TypeVar("T")
Results = dict[str, torch.Tensor]
"""By the names of their places, on the CPU."""


@dataclass(slots=True, kw_only=True)
class Exact:
    """Float64 results, what they were computed on, and passes with noise; by `mode::name`.

    Attributes
    ----------
    results : dict
        Of each module and output on given inputs.
    given : dict
        What enters and leaves the blocks, in the tested dtype.
    ends : dict
        ForwardOutputs from end to end.
    ends_drawn : dict of str to list of dict
        The same of passes with noise, by mode, where more is judged by them.
    failures : dict of str to str
        Why a mode has none.
    """

    track: Track
    results: Results = field(default_factory=dict)
    given: Results = field(default_factory=dict)
    ends: Activations = field(default_factory=dict)
    ends_drawn: dict[str, list[Activations]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def run(context: Context) -> None:
    """Record every module of a block, what enters the blocks, and the outputs in every mode."""
    case, model = context.job.case, context.model
    inputs, reason = fixed_inputs(case, context.base.model)
    if inputs is None or reason:
        context.record.skipped("forward", reason, *_modes(context))
        return
    if not inputs_fit(context, "forward", inputs):
        context.record.skipped("forward", "ids or labels are past the end of a table", *_modes(context))
        return
    ends, refused = _run_ends(context, inputs)
    for mode, reason in refused.items():
        context.record.skipped("forward", reason, mode)
    if not context.job.makes_reference:
        _judge_all(context, inputs, ends, wait_for(context.scratch, context.events))
        return
    on_cpu = context.device.type == CPU
    with nullcontext() if on_cpu else context.events.on_cpu():
        twin = model if on_cpu else load_model(case, CPU)
        exact, answer = _make(context, twin, inputs)
    _judge_all(context, inputs, ends, answer)
    with nullcontext() if on_cpu else context.events.on_cpu():
        if not on_cpu:
            ends = {mode: in_mode(twin, mode, functools.partial(activations, twin, inputs)) for mode in ends}
        again = functools.partial(exact.track.other, f"{ON}.{END_TO_END}")
        record_merge_effect(context, twin, inputs, computed=ends, refused=refused, exact=exact.ends, again=again)
        _judge_more(context, twin, inputs, exact)


def _run_ends(context: Context, inputs: Activations) -> tuple[dict[str, Activations], dict[str, str]]:
    """Run the model from end to end in every mode; return the outputs, and why a mode has none."""
    ends: dict[str, Activations] = {}
    refused: dict[str, str] = {}
    kernels = half_kernels.replacement(context.model, tokens_of(inputs))
    for mode in _modes(context):
        try:
            with context.events.passes(titles.whole(mode)), half_kernels.computing(kernels):
                context.events.step(titles.whole(mode), 0, 1)
                ends[mode] = _in_mode(
                    context, context.model, inputs, mode, functools.partial(activations, context.model, inputs)
                )
        except Skip as skip:
            refused[mode] = str(skip)
    return ends, refused


def _judge_all(context: Context, inputs: Activations, ends: dict[str, Activations], answer: Reference | str) -> None:
    if isinstance(answer, str):
        context.record.skipped("forward", answer, *ends, status="blocked")
        return
    for mode in ends:
        is_compared = mode in _by_blocks(context, context.model)
        _record_ends(context, mode, ends[mode], answer, {} if is_compared else {BY_BLOCKS: False})
        if is_compared and not answer.tables.failures.get(_exact(mode)):
            title = titles.by_blocks(mode)
            with context.events.passes(title), context.record.skipping("forward", mode):
                context.events.step(title, 0, 1)
                _judge(context, inputs, mode, answer)


def results_of(model: torch.nn.Module, inputs: Activations, given: Given, began: BlockBegan = no_listener) -> Results:
    """Return the results of the device that is checked on what is given, on the CPU: where faults are planted."""
    found: Results = {}

    def take(place: ResultPlace, result: torch.Tensor) -> None:
        found[str(place)] = result.detach().to(CPU, copy=True)

    run_by_blocks(model, inputs, given, take, began=began)
    return found


def _judge(context: Context, inputs: Activations, mode: str, answer: Reference) -> None:
    """Run the blocks of a mode on what is given, and record their results."""
    case, model = context.job.case, context.model
    kernels = half_kernels.replacement(model, tokens_of(inputs))
    digests: dict[str, list[TensorDigest]] = {}
    attention = AttentionKernels()
    with half_kernels.computing(kernels):
        run = functools.partial(by_blocks, context, inputs, mode, answer)
        with attention.following(model):
            found, replay = _in_mode(context, model, inputs, mode, run)
        for name, result in found.items():
            digests[name] = [digest(result)]
        for _ in range(1, case.repeat):
            for name, result in _in_mode(context, model, inputs, mode, run)[0].items():
                digests[name].append(digest(result))
    if mode != MERGED and context.record.wants("forward", WHOLE_MODEL):
        record_given(context, "forward", mode, answer)
    reason = "" if replay.was_complete(_exact(mode)) else NOT_REPLAYED
    if why := attention.never_called():
        context.record.fact("forward", WHOLE_MODEL, f"{mode}.{ATTENTION}", status="skipped", reason=why)

    def again(saw: Saw) -> None:
        _in_mode(context, model, inputs, mode, functools.partial(run, saw=saw))

    made = {row_of(mode, name): name for name in found if "::input." not in name}
    with context.record.tracing(computed_again(context, made, again, lambda: half_kernels.computing(kernels))):
        for name, result in found.items():
            layer, tensor = row_of(mode, name)
            if not context.record.wants("forward", layer):
                continue
            if why := attention.missed(layer):
                record_missed(context, "forward", (layer, tensor), result.dtype, why)
            else:
                row = TensorRecord(
                    "forward",
                    layer,
                    tensor,
                    rule=Rule.BLOCK,
                    status="measured",
                    reason=reason or None,
                    evidence={**half_kernels.evidence(kernels), **attention.evidence(layer)},
                )
                record_block(
                    context,
                    row,
                    result,
                    digests=digests[name],
                    reference=answer,
                    name=f"{mode}::{name}",
                    exact_name=f"{_exact(mode)}::{name}",
                    named=_named(mode),
                )
    record_flips(context, "forward", replay.flips, mode=mode)


def by_blocks(
    context: Context, inputs: Activations, mode: str, answer: Reference, *, saw: Saw | None = None
) -> tuple[Results, Replay]:
    """Run the blocks in a mode that the model is in, on the decisions of the exact pass; return what was decided.

    `saw` is called with what enters and leaves the blocks.
    """
    model = context.model
    replay = Replay(_decisions(context), model, f"{cpu_error.products_on(model, context.device)}{_named(mode)}")
    given = functools.partial(answer.given, _exact(mode))

    def given_and_seen(name: str, own: torch.Tensor) -> torch.Tensor:
        return given(name, own if saw is None else saw(name, own))

    with deciding(replay.watch_if_any(_exact(mode)), gradient=False, places=replay.places):
        return results_of(model, inputs, given_and_seen, context.events.block), replay


def row_of(mode: str, name: str) -> tuple[str, str]:
    """Return layer and tensor of a result in a mode."""
    place = ResultPlace.of(name)
    return place.layer, f"{mode}.{place.part}" if place.part else mode


def _in_mode(context: Context, model: torch.nn.Module, inputs: Activations, mode: str, run: Callable[[], T]) -> T:
    """Run the model in a mode; say why it does not."""
    try:
        return in_mode(model, mode, run)
    except MergeRefusedError as refused:
        raise Skip(f"PEFT does not merge this adapter: {refused}") from refused
    except DisableRefusedError as refused:
        raise Skip(f"PEFT does not disable this adapter: {refused}") from refused
    except Exception as error:  # model code of any kind may raise anything
        if context_is_lost(error):
            raise KernelAssertedError(asserted(inputs, context.device, error)) from error
        if not is_of_the_model(error, model):
            raise
        raise Skip(refusal(context.job.case, error)) from error


def _record_ends(context: Context, mode: str, ends: Activations, reference: Reference, more: dict[str, Any]) -> None:
    """Record the outputs of the device's own pass, and how far they are from float64: what a user allows is a limit."""
    for name, output in ends.items():
        if not context.record.wants("forward", name):
            continue
        exact = reference.read(f"{END_TO_END}::{_exact(mode)}::{name}")
        truth = None if exact is None or exact.shape[1:] != output.shape[1:] else mapped(exact)
        known = truth is not None and output.dtype in UNIT_ROUNDOFF
        compared = output if truth is None else output[: len(truth)]
        evidence = dict(more)
        if known and truth is not None and name.endswith(LOGITS) and output.dim() in (2, 3) and output.shape[-1] > 1:
            evidence["positions"] = compared.shape[:-1].numel()
            evidence["top1_changed"] = int((compared.argmax(-1) != truth.argmax(-1)).sum())
        found, chunks = None, None
        tolerance = context.record.tolerance(stage="forward", layer=name, dtype=output.dtype) if known else None
        if known and truth is not None:
            found = measure_against_exact(compared, truth, tolerance)
            chunks = None if tolerance is None else functools.partial(exact_chunks, compared, truth, tolerance)
        is_finite = found is not None and math.isfinite(float(found.max_abs))
        row = TensorRecord(
            "forward",
            name,
            f"{mode}.{END_TO_END}",
            rule=Rule.BLOCK,
            status="within" if is_finite else "measured",
            evidence=evidence,
            reason=reference.tables.failures.get(_exact(mode)) or (NOT_JUDGED if known and not tolerance else None),
        )
        context.record.computed(row, output, found=found, tolerance=tolerance, chunks=chunks)


NOT_JUDGED = "shown, not judged: from end to end errors add up, and a trained model amplifies them"


def _make(context: Context, model: torch.nn.Module, inputs: Activations) -> tuple[Exact, Reference]:
    """Compute what all workers are judged by, on the CPU, and publish it."""
    case, exact = context.job.case, Exact(track=Track(_decisions(context)))
    modes = _modes(context)
    # of a large model one sequence shows how far the outputs are from float64
    is_whole = len(_by_blocks(context, model)) == len(modes) or bool(_output_judges(context))
    of_ends = inputs if is_whole else first_sequences(inputs, 1)
    found: dict[str, dict[str, Any]] = {}
    for mode in modes:
        is_compared = mode in _by_blocks(context, model)
        try:
            with model_code(model):  # which may insist on its own dtype
                if mode != MERGED:
                    with context.events.passes(titles.exact(mode)):
                        context.events.step(titles.exact(mode), 0, 1)
                        began = context.events.block
                        _in_float64(model, inputs, mode, exact, by_blocks=is_compared, of_ends=of_ends, began=began)
                if not is_compared or _exact(mode) in exact.failures:
                    continue
                with context.events.passes(titles.noise(mode)):
                    drawn = _draw(context, model, inputs, mode, exact)
        except (MergeRefusedError, DisableRefusedError):  # each worker says so
            continue
        except Skip as skip:
            exact.failures[mode] = str(skip)
            continue
        truth = _of_mode(exact.results, _exact(mode))
        for title, of_title in spreads(drawn, truth).items():
            found.setdefault(title, {}).update({f"{mode}::{name}": one for name, one in of_title.items()})
    exact.track.publish()
    tensors = {
        **exact.results,
        **named_factors(found),
        **exact.given,
        **{f"{END_TO_END}::{name}": value for name, value in exact.ends.items()},
    }
    tables = Tables(
        failures=exact.failures,
        names=tuple(tensors),
        limits=limits_of(found),
    )
    if context.job.others_wait or case.soak_s is not None or _is_read(case.stages):
        publish(context.scratch, tensors, tables)
    return exact, Reference(path=context.scratch / REFERENCE_FILE, tables=tables, made=tensors)


def _in_float64(
    model: torch.nn.Module,
    inputs: Activations,
    mode: str,
    exact: Exact,
    *,
    by_blocks: bool,
    of_ends: Activations,
    began: BlockBegan,
) -> None:
    """Compute a mode in float64, on values that it rounds itself, and from end to end."""
    dtype = next(p.dtype for p in model.parameters() if p.dtype in UNIT_ROUNDOFF)

    def given(name: str, value: torch.Tensor) -> torch.Tensor:
        kept = exact.given[given_name(mode, name)] = rounded(value, dtype)
        return kept.to(value.dtype)

    def take(place: ResultPlace, result: torch.Tensor) -> None:
        exact.results[f"{mode}::{place}"] = as_exact(result, dtype)

    def compute() -> Activations:
        if by_blocks:
            with deciding(exact.track.exact(mode), gradient=False):
                run_by_blocks(model, inputs, given, take, began=began)
        with deciding(exact.track.exact(f"{mode}.{END_TO_END}"), gradient=False):
            return activations(model, of_ends)

    with torch.no_grad(), exact_layers(model), Float64Mode():
        ends = in_mode(model, mode, compute)
    exact.ends.update({f"{mode}::{name}": tensor.to(torch.float64) for name, tensor in ends.items()})


def _draw(
    context: Context, model: torch.nn.Module, inputs: Activations, mode: str, exact: Exact
) -> dict[str, list[Callable[[str], torch.Tensor | None]]]:
    """Compute a mode with noise, on the exact pass's values and decisions."""
    kernels = half_kernels.replacement(model, tokens_of(inputs))
    named = _named(mode)

    given = functools.partial(Reference.of_this_process(exact.given).given, _exact(mode))

    def compute(title: str) -> Results:
        found: Results = {}

        def take(place: ResultPlace, result: torch.Tensor) -> None:
            found[str(place)] = result.detach()

        def run() -> None:
            with deciding(exact.track.other(_exact(mode), title), gradient=False):
                run_by_blocks(model, inputs, given, take, began=context.events.block)

        with half_kernels.computing(kernels):
            in_mode(model, mode, run)
        return found

    truth = _of_mode(exact.results, _exact(mode))
    counts = [rows_of(tensor) for tensor in truth.values() if tensor.is_floating_point()]
    drawn = draw(context, model, compute, passes_for(model, tokens_of(inputs), counts), named=named)
    if _output_judges(context):
        _draw_ends(context, model, inputs, mode, exact)
    return {title: [one.get for one in several] for title, several in drawn.items()}


def _draw_ends(context: Context, model: torch.nn.Module, inputs: Activations, mode: str, exact: Exact) -> None:
    """Compute the outputs from end to end with noise, for what judges by them."""
    known = exact.ends.get(f"{_exact(mode)}::{LOGITS}")
    if known is not None:
        run = functools.partial(in_mode, model, mode, functools.partial(activations, model, inputs))
        drawn = draw(context, model, lambda _: run(), passes_for(model, tokens_of(inputs), [rows_of(known)]))
        exact.ends_drawn[mode] = drawn[cpu_error.products_on(model, CPU)]


def _of_mode(tensors: Results, mode: str) -> Results:
    return {name.removeprefix(f"{mode}::"): one for name, one in tensors.items() if name.startswith(f"{mode}::")}


def _is_read(stages: Iterable[Stage]) -> bool:
    """Return whether another stage of the same worker reads the float64 results."""
    return any(standard.FORWARD in (*SPECS[stage].by, *SPECS[stage].reads) for stage in stages)


def _output_judges(context: Context) -> list[OutputJudge]:
    """Return what judges more by the outputs of this case."""
    return [*plugins.asked("output_judges", context.job.case)]


def _judge_more(context: Context, model: torch.nn.Module, inputs: Activations, exact: Exact) -> None:
    """Let plug-ins judge by the outputs what they judge."""
    judges = _output_judges(context)
    if not judges:
        return
    ends = {mode: exact.ends[f"{mode}::{LOGITS}"] for mode in (ON, OFF) if f"{mode}::{LOGITS}" in exact.ends}
    drawn = {mode: [one[LOGITS] for one in passes] for mode, passes in exact.ends_drawn.items()}
    outputs = ForwardOutputs(
        model=model,
        inputs=inputs,
        drawn=drawn,
        failures=exact.failures,
        exact=ends,
        again=functools.partial(exact.track.other, f"{ON}.{END_TO_END}"),
    )
    for judge in judges:
        judge.judge(context, outputs)


def _decisions(context: Context) -> Path:
    return context.scratch / DECISIONS_FILE.format("forward")


def _named(mode: str) -> str:
    """Return what is added to the name of a device's products in a mode: a merged adapter has errors of its own."""
    return ", merged" if mode == MERGED else ""


def _modes(context: Context) -> list[str]:
    if context.job.case.adapter is None:
        return [OFF]
    return [ON, OFF, MERGED] if any(True for _ in adapted_layers(context.model)) else [ON, OFF]


def _by_blocks(context: Context, model: torch.nn.Module) -> list[str]:
    """Return the modes whose blocks are compared: of a large model, with the adapter alone.

    The same weights are multiplied by the same kernels without it, and the stage `merged` judges merged weights.
    """
    modes = _modes(context)
    return modes if matrix_elements(model) <= context.job.case.plan.float64_merges else modes[:1]


def in_mode(model: Any, mode: str, run: Callable[[], T]) -> T:
    """Run the model in a mode."""
    if mode == MERGED:
        return in_merged(model, run)
    with disabled(model) if mode == OFF and hasattr(model, "peft_config") else nullcontext():
        return run()


def _exact(mode: str) -> str:
    """Return the mode of the float64 pass that serves one."""
    return ON if mode == MERGED else mode
