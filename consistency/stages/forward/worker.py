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
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from consistency.capture.names import ADAPTER_MERGED as MERGED
from consistency.capture.names import ADAPTER_ON as ON
from consistency.capture.names import ATTENTION, BY_BLOCKS, END_TO_END, LOGITS, WHOLE_MODEL
from consistency.capture.records import RecordStatus, TensorRecord
from consistency.case import standard
from consistency.devices.backends import CPU
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.error import measure_against_exact
from consistency.numerics.file_tensor import mapped
from consistency.numerics.rounded_products import RoundedProducts
from consistency.numerics.rules import Rule
from consistency.stages.forward import passes as titles
from consistency.stages.forward.long_text import judge_long_text
from consistency.stages.forward.merge_effect import record_merge_effect
from consistency.stages.forward.modes import block_modes, exact_mode_of, in_mode, modes_of, products_suffix
from consistency.stages.forward.reference import Results, decisions_file, let_plugins_judge, make_reference
from consistency.stages.forward.wide_products import PRODUCTS, record_narrow_products
from consistency.worker import cpu_error
from consistency.worker.attention_kernels import AttentionKernels
from consistency.worker.context import Context, inputs_fit
from consistency.worker.decisions.replay import Replay, deciding
from consistency.worker.judging.block_rule import (
    NOT_REPLAYED,
    computed_again,
    record_block,
    record_flips,
    record_given,
    record_missed,
)
from consistency.worker.judging.long_text import long_mode, long_text
from consistency.worker.model import half_kernels
from consistency.worker.model.block_pass import (
    BlockBegan,
    Given,
    ResultPlace,
    no_listener,
    run_by_blocks,
)
from consistency.worker.model.call_trace import Saw
from consistency.worker.model.float64_reference import Reference, wait_for
from consistency.worker.model.id_checks import KernelAssertedError, asserted, context_is_lost
from consistency.worker.model.inputs import fixed_inputs
from consistency.worker.model.loading import load_model
from consistency.worker.model.merging import DisableRefusedError, MergeRefusedError
from consistency.worker.model.running import (
    Activations,
    activations,
    is_of_the_model,
    refusal,
    tokens_of,
)
from consistency.worker.recorder import Skip

T = TypeVar("T")
NOT_JUDGED = "shown, not judged: over the whole model rounding errors add up, and a trained model amplifies them"


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockResults:
    """The results of the blocks in a mode on this device, and how it computed them."""

    results: Results
    """Results of the first run, by name."""
    digests: dict[str, list[TensorDigest]]
    """Digests of each result, one per run."""
    replay: Replay
    """The decisions of the exact pass, as the first run followed them."""
    attention: AttentionKernels
    kernels: RoundedProducts | None
    """What multiplied in place of slow kernels; None where the device's own did."""
    run: Callable[..., tuple[Results, Replay]]
    """Runs the blocks again, with `saw` as `by_blocks` has it."""


def run(context: Context) -> None:
    """Record every module of a block, what enters the blocks, and the outputs in every mode."""
    case = context.job.case
    inputs, reason = fixed_inputs(case, context.base.model)
    if inputs is None or reason:
        context.record.skipped("forward", reason, *modes_of(context))
        return
    if not inputs_fit(context, "forward", inputs):
        context.record.skipped("forward", "ids or labels are past the end of a table", *modes_of(context))
        return
    # the device's own passes come first: it has no need to wait for the reference
    ends, refused = _run_ends(context, inputs)
    for mode, reason in refused.items():
        context.record.skipped("forward", reason, mode)
    if context.job.makes_reference:
        _run_with_reference(context, inputs, ends, refused)
    else:
        _judge_all(context, inputs, ends, wait_for(context.scratch, context.events))


def _run_with_reference(
    context: Context, inputs: Activations, ends: dict[str, Activations], refused: dict[str, str]
) -> None:
    """Compute the reference on the CPU, judge this device by it, and record what merging does to the outputs.

    Parameters
    ----------
    ends : dict of str to dict
        The outputs of this device from end to end, by mode; emptied when they are judged.
    refused : dict of str to str
        Why a mode has no outputs.
    """
    on_cpu = context.device.type == CPU
    twin = context.model
    with nullcontext() if on_cpu else context.events.on_cpu():
        if not on_cpu:
            twin = load_model(context.job.case, CPU)
        exact, reference = make_reference(context, twin, inputs)
    _judge_all(context, inputs, ends, reference)
    with nullcontext() if on_cpu else context.events.on_cpu():
        computed = ends
        if not on_cpu:  # merged and unmerged outputs are compared on the CPU alone: errors of the device are not in it
            computed = {mode: in_mode(twin, mode, functools.partial(activations, twin, inputs)) for mode in ends}
            ends.clear()  # or the caller holds the outputs of the device meanwhile
        # makes what lets one more pass from end to end decide as the float64 pass did
        again = functools.partial(exact.track.other, f"{ON}.{END_TO_END}")
        record_merge_effect(context, twin, inputs, computed=computed, refused=refused, exact=exact.ends, again=again)
        let_plugins_judge(context, twin, inputs, exact)


def _run_ends(context: Context, inputs: Activations) -> tuple[dict[str, Activations], dict[str, str]]:
    """Run the model from end to end in every mode; return the outputs, and why a mode has none, both by mode."""
    ends: dict[str, Activations] = {}
    refused: dict[str, str] = {}
    kernels = half_kernels.replacement(context.model, tokens_of(inputs))
    run_model = functools.partial(activations, context.model, inputs)
    for mode in modes_of(context):
        try:
            with context.events.passes(titles.whole(mode)), half_kernels.computing(kernels):
                context.events.step(titles.whole(mode), 0, 1)
                ends[mode] = _in_mode_or_skip(context, inputs, mode, run_model)
        except Skip as skip:
            refused[mode] = str(skip)
    return ends, refused


def _judge_all(context: Context, inputs: Activations, ends: dict[str, Activations], reference: Reference | str) -> None:
    """Record the outputs and the blocks of every mode.

    Parameters
    ----------
    reference : Reference or str
        A text is the reason why there is no reference: the outputs of every mode are then blocked, and no block is run.
    """
    if isinstance(reference, str):
        context.record.skipped("forward", reference, *ends, status="blocked")
        return
    for mode in ends:
        is_compared = mode in block_modes(context, context.model)
        evidence: dict[str, Any] = {} if is_compared else {BY_BLOCKS: False}
        _record_ends(context, mode, ends[mode], reference, evidence)
        if is_compared and not reference.tables.failures.get(exact_mode_of(mode)):
            title = titles.by_blocks(mode)
            with context.events.passes(title), context.record.skipping("forward", mode):
                context.events.step(title, 0, 1)
                _judge_blocks(context, inputs, mode, reference)
    _judge_long_text(context, reference)
    if ends:
        with context.record.skipping("forward", PRODUCTS):
            record_narrow_products(context, inputs, reference)


def _judge_long_text(context: Context, reference: Reference) -> None:
    """Judge the long text in the first mode; record why there is none, where the case asks for one."""
    mode = modes_of(context)[0]
    long = long_mode(mode)
    text, reason = long_text(context)
    reason = reason or reference.tables.failures.get(long, "")
    if reason:
        context.record.fact(standard.FORWARD, WHOLE_MODEL, long, status="skipped", reason=f"no long text: {reason}")
    elif text is not None:
        with context.record.skipping(standard.FORWARD, long):
            judge_long_text(context, text, mode, reference)


def results_of(model: torch.nn.Module, inputs: Activations, given: Given, began: BlockBegan = no_listener) -> Results:
    """Return this device's results on the given block inputs, copied to the CPU: planted faults change them here."""
    results: Results = {}

    def take(place: ResultPlace, result: torch.Tensor) -> None:
        results[str(place)] = result.detach().to(CPU, copy=True)

    run_by_blocks(model, inputs, given, take, began=began)
    return results


def _judge_blocks(context: Context, inputs: Activations, mode: str, reference: Reference) -> None:
    """Run the blocks in a mode on the reference's block inputs, and record their results."""
    computation = _compute_blocks(context, inputs, mode, reference)
    # a merged adapter has the block inputs of the adapter on, and these have a row already
    if mode != MERGED and context.record.wants("forward", WHOLE_MODEL):
        record_given(context, "forward", mode, reference)
    if not_called := computation.attention.never_called():
        context.record.fact("forward", WHOLE_MODEL, f"{mode}.{ATTENTION}", status="skipped", reason=not_called)
    _record_blocks(context, inputs, mode, reference, computation)
    record_flips(context, "forward", computation.replay.flips, mode=mode)


def _compute_blocks(context: Context, inputs: Activations, mode: str, reference: Reference) -> _BlockResults:
    """Run the blocks in a mode as often as the case asks; keep the results of the first run."""
    kernels = half_kernels.replacement(context.model, tokens_of(inputs))
    digests: dict[str, list[TensorDigest]] = {}
    attention = AttentionKernels()
    run_blocks = functools.partial(by_blocks, context, inputs, mode, reference)
    with half_kernels.computing(kernels):
        with attention.following(context.model):
            results, replay = _in_mode_or_skip(context, inputs, mode, run_blocks)
        for name, result in results.items():
            digests[name] = [digest(result)]
        # further runs only have to repeat the bits of the first: their results are not kept
        for _ in range(1, context.job.case.repeat):
            for name, result in _in_mode_or_skip(context, inputs, mode, run_blocks)[0].items():
                digests[name].append(digest(result))
    return _BlockResults(
        results=results, digests=digests, replay=replay, attention=attention, kernels=kernels, run=run_blocks
    )


def _record_blocks(
    context: Context, inputs: Activations, mode: str, reference: Reference, computation: _BlockResults
) -> None:
    """Record every result by the `block` rule, and trace one that is outside to an operation of its block."""
    kernels, attention = computation.kernels, computation.attention
    exact_mode = exact_mode_of(mode)
    reason = None if computation.replay.was_complete(exact_mode) else NOT_REPLAYED

    def compute_again(saw: Saw) -> None:
        _in_mode_or_skip(context, inputs, mode, functools.partial(computation.run, saw=saw))

    # no module makes what is given to the model, so nothing can be traced in it
    names_by_row = {row_of(mode, name): name for name in computation.results if "::input." not in name}
    tracing = computed_again(context, names_by_row, compute_again, lambda: half_kernels.computing(kernels))
    with context.record.tracing(tracing):
        for name, result in computation.results.items():
            layer, tensor = row_of(mode, name)
            if not context.record.wants("forward", layer):
                continue
            if missed := attention.missed(layer):
                record_missed(context, "forward", (layer, tensor), result.dtype, missed)
                continue
            row = TensorRecord(
                "forward",
                layer,
                tensor,
                rule=Rule.BLOCK,
                status="measured",
                reason=reason,
                evidence={**half_kernels.evidence(kernels), **attention.evidence(layer)},
            )
            record_block(
                context,
                row,
                result,
                digests=computation.digests[name],
                reference=reference,
                name=f"{mode}::{name}",
                exact_name=f"{exact_mode}::{name}",
                named=products_suffix(mode),
            )


def by_blocks(
    context: Context, inputs: Activations, mode: str, answer: Reference, *, saw: Saw | None = None
) -> tuple[Results, Replay]:
    """Run the blocks on the reference's block inputs, with the decisions of the exact pass.

    The model is in the mode already: see `in_mode`. Return the results, and what this device decided otherwise.

    Parameters
    ----------
    answer : Reference
        Has what enters and leaves the blocks in the exact pass.
    saw : callable, optional
        Called with what enters and leaves each block on this device; returns the value to go on with.
    """
    model = context.model
    title = f"{cpu_error.products_on(model, context.device)}{products_suffix(mode)}"
    replay = Replay(decisions_file(context), model, title)
    exact_mode = exact_mode_of(mode)

    def given(name: str, value: torch.Tensor) -> torch.Tensor:
        if saw is not None:
            value = saw(name, value)
        return answer.given_value(exact_mode, name, value)

    with deciding(replay.watch_if_any(exact_mode), gradient=False, places=replay.places):
        return results_of(model, inputs, given, context.events.block), replay


def row_of(mode: str, name: str) -> tuple[str, str]:
    """Return layer and tensor of the row of a result, by the name of its place."""
    place = ResultPlace.of(name)
    tensor = f"{mode}.{place.part}" if place.part else mode
    return place.layer, tensor


def _in_mode_or_skip(context: Context, inputs: Activations, mode: str, run: Callable[[], T]) -> T:
    """Run the model of the worker in a mode; raise `Skip` with the reason where PEFT or the model refuses.

    Raises
    ------
    KernelAssertedError
        A kernel's assertion ended the device's context: nothing more can be computed on it.
    """
    model = context.model
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
        raise Skip(refusal(context.job.case, error, model)) from error


def _record_ends(
    context: Context, mode: str, ends: Activations, reference: Reference, evidence: Mapping[str, Any]
) -> None:
    """Record the outputs of the device's pass from end to end, and their distance from the float64 outputs."""
    for name, output in ends.items():
        if context.record.wants("forward", name):
            _record_end(context, mode, name, output, reference, evidence)


def _record_end(
    context: Context, mode: str, name: str, output: torch.Tensor, reference: Reference, evidence: Mapping[str, Any]
) -> None:
    """Record one output of that pass, with how many of its most likely words are others.

    Only a user's tolerance judges it. Without one it is shown, `within` where its distance is finite: see `NOT_JUDGED`.
    """
    exact = reference.read(f"{END_TO_END}::{exact_mode_of(mode)}::{name}")
    truth = None
    # of a large model the reference has the first sequence alone, so the first dimensions may differ
    if exact is not None and exact.shape[1:] == output.shape[1:] and output.dtype in UNIT_ROUNDOFF:
        truth = mapped(exact)
    tolerance, measure, chunks = None, None, None
    evidence = dict(evidence)
    if truth is not None:
        compared = output[: len(truth)]
        if name.endswith(LOGITS) and output.dim() in (2, 3) and output.shape[-1] > 1:
            evidence["positions"] = compared.shape[:-1].numel()
            evidence["top1_changed"] = int((compared.argmax(-1) != truth.argmax(-1)).sum())
        tolerance = context.record.tolerance(stage="forward", layer=name, dtype=output.dtype)
        measure = measure_against_exact(compared, truth, tolerance)
        if tolerance is not None:
            chunks = functools.partial(exact_chunks, compared, truth, tolerance)
    is_finite = measure is not None and math.isfinite(float(measure.max_abs))
    status: RecordStatus = "within" if is_finite else "measured"
    not_judged = NOT_JUDGED if truth is not None and not tolerance else None
    row = TensorRecord(
        "forward",
        name,
        f"{mode}.{END_TO_END}",
        rule=Rule.BLOCK,
        status=status,
        evidence=evidence,
        reason=reference.tables.failures.get(exact_mode_of(mode)) or not_judged,
    )
    context.record.computed(row, output, measure=measure, tolerance=tolerance, chunks=chunks)
