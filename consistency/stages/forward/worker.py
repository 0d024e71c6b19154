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
from collections.abc import Callable, Iterable, Mapping
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
from consistency.capture.records import RecordStatus, TensorRecord
from consistency.case import standard
from consistency.case.stage import Stage
from consistency.case.stages import SPECS
from consistency.devices.backends import CPU
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.error import measure_against_exact
from consistency.numerics.error_spread import Spread
from consistency.numerics.exact import Float64Mode
from consistency.numerics.file_tensor import mapped
from consistency.numerics.rounded_products import RoundedProducts
from consistency.numerics.rules import Rule
from consistency.stages.forward import passes as titles
from consistency.stages.forward.long_text import judge_long_text, make_long_reference
from consistency.stages.forward.merge_effect import record_merge_effect
from consistency.stages.forward.wide_products import PRODUCTS, record_narrow_products
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
from consistency.worker.judging.long_text import long_mode, long_text
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
from consistency.worker.product_types import product_types
from consistency.worker.protocol import DECISIONS_FILE, REFERENCE_FILE
from consistency.worker.quantized.exact import exact_layers
from consistency.worker.recorder import Skip

T = TypeVar("T")
Results = dict[str, torch.Tensor]
"""Results of modules on the CPU, by the names of their places."""

PassReaders = dict[str, list[Callable[[str], torch.Tensor | None]]]
"""Functions by the name of the products, one per noisy pass: each returns a result by its name, None without one."""

NOT_JUDGED = "shown, not judged: over the whole model rounding errors add up, and a trained model amplifies them"


@dataclass(slots=True, kw_only=True)
class Exact:
    """Float64 results, the block inputs that they were computed on, and passes with noise; by `mode::name`.

    Attributes
    ----------
    results : dict
        The float64 result of each module, and each output, on the block inputs.
    given : dict
        What enters and leaves the blocks, in the tested dtype.
    ends : dict
        The float64 outputs of the model from end to end.
    ends_drawn : dict of str to list of dict
        The outputs of noisy passes from end to end, by mode; empty unless a plug-in judges by them.
    failures : dict of str to str
        Why a mode has no float64 results, by mode.
    """

    track: Track
    results: Results = field(default_factory=dict)
    given: Results = field(default_factory=dict)
    ends: Activations = field(default_factory=dict)
    ends_drawn: dict[str, list[Activations]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


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
        context.record.skipped("forward", reason, *_modes(context))
        return
    if not inputs_fit(context, "forward", inputs):
        context.record.skipped("forward", "ids or labels are past the end of a table", *_modes(context))
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
        exact, reference = _make_reference(context, twin, inputs)
    _judge_all(context, inputs, ends, reference)
    with nullcontext() if on_cpu else context.events.on_cpu():
        computed = ends
        if not on_cpu:  # merged and unmerged outputs are compared on the CPU alone: errors of the device are not in it
            computed = {mode: in_mode(twin, mode, functools.partial(activations, twin, inputs)) for mode in ends}
            ends.clear()  # or the caller holds the outputs of the device meanwhile
        # makes what lets one more pass from end to end decide as the float64 pass did
        again = functools.partial(exact.track.other, f"{ON}.{END_TO_END}")
        record_merge_effect(context, twin, inputs, computed=computed, refused=refused, exact=exact.ends, again=again)
        _let_plugins_judge(context, twin, inputs, exact)


def _run_ends(context: Context, inputs: Activations) -> tuple[dict[str, Activations], dict[str, str]]:
    """Run the model from end to end in every mode; return the outputs, and why a mode has none, both by mode."""
    ends: dict[str, Activations] = {}
    refused: dict[str, str] = {}
    kernels = half_kernels.replacement(context.model, tokens_of(inputs))
    run_model = functools.partial(activations, context.model, inputs)
    for mode in _modes(context):
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
        is_compared = mode in _block_modes(context, context.model)
        evidence: dict[str, Any] = {} if is_compared else {BY_BLOCKS: False}
        _record_ends(context, mode, ends[mode], reference, evidence)
        if is_compared and not reference.tables.failures.get(_exact_mode(mode)):
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
    mode = _modes(context)[0]
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
    exact_mode = _exact_mode(mode)
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
                named=_products_suffix(mode),
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
    title = f"{cpu_error.products_on(model, context.device)}{_products_suffix(mode)}"
    replay = Replay(_decisions_file(context), model, title)
    exact_mode = _exact_mode(mode)

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
    exact = reference.read(f"{END_TO_END}::{_exact_mode(mode)}::{name}")
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
        reason=reference.tables.failures.get(_exact_mode(mode)) or not_judged,
    )
    context.record.computed(row, output, measure=measure, tolerance=tolerance, chunks=chunks)


def _make_reference(context: Context, model: torch.nn.Module, inputs: Activations) -> tuple[Exact, Reference]:
    """Compute the reference of all workers with a model on the CPU; publish it where another process or stage reads it.

    Returns
    -------
    Exact
        What was computed, for what this worker itself records by it.
    Reference
        The same as other workers read it.
    """
    case, exact = context.job.case, Exact(track=Track(_decisions_file(context)))
    modes = _modes(context)
    # of a large model one sequence shows how far the outputs are from float64
    is_small = len(_block_modes(context, model)) == len(modes)
    takes_all_sequences = is_small or bool(_output_judges(context))
    end_inputs = inputs if takes_all_sequences else first_sequences(inputs, 1)
    spreads_by_title: dict[str, dict[str, Spread]] = {}
    for mode in modes:
        drawn = _compute_mode(context, model, inputs, mode, exact, end_inputs=end_inputs)
        if drawn is None:
            continue
        truth = _results_of_mode(exact.results, _exact_mode(mode))
        for title, spreads_by_name in spreads(drawn, truth).items():
            spreads_by_title.setdefault(title, {}).update(
                {f"{mode}::{name}": spread for name, spread in spreads_by_name.items()}
            )
    exact.track.publish()
    _add_long_text(context, model, modes[0], exact, spreads_by_title)
    tensors = {
        **exact.results,
        **named_factors(spreads_by_title),
        **exact.given,
        **{f"{END_TO_END}::{name}": value for name, value in exact.ends.items()},
    }
    with model_code(model):
        types = product_types(model, inputs)
    tables = Tables(
        failures=exact.failures,
        names=tuple(tensors),
        product_types=types,
        limits=limits_of(spreads_by_title),
    )
    # a soak reads it from the file again; where nobody does, none is written
    if context.job.others_wait or case.soak_s is not None or _is_read_by_another_stage(case.stages):
        publish(context.scratch, tensors, tables)
    return exact, Reference(path=context.scratch / REFERENCE_FILE, tables=tables, in_memory=tensors)


def _add_long_text(
    context: Context,
    model: torch.nn.Module,
    mode: str,
    exact: Exact,
    spreads_by_title: dict[str, dict[str, Spread]],
) -> None:
    """Add the long text in a mode to the exact results, to the block inputs, and to the spreads of rounding errors."""
    text, _ = long_text(context)
    if text is None or mode in exact.failures:
        return
    long = long_mode(mode)
    try:
        with context.events.passes(titles.LONG_TEXT):
            context.events.step(titles.LONG_TEXT, 0, 1)
            made = make_long_reference(context, model, text)
    except Skip as skip:
        exact.failures[long] = str(skip)
        return
    drawn: PassReaders = {}
    for title, noisy_passes in made.drawn.items():
        drawn[title] = [results.get for results in noisy_passes]
    for title, spreads_by_name in spreads(drawn, made.exact).items():
        spreads_by_title.setdefault(title, {}).update(
            {f"{long}::{name}": spread for name, spread in spreads_by_name.items()}
        )
    exact.results.update({f"{long}::{name}": result for name, result in made.exact.items()})
    exact.given.update({given_name(long, name): value for name, value in made.given.items()})


def _compute_mode(
    context: Context,
    model: torch.nn.Module,
    inputs: Activations,
    mode: str,
    exact: Exact,
    *,
    end_inputs: Activations,
) -> PassReaders | None:
    """Compute a mode in float64 into `exact`, and then with noise; return readers of the noisy passes.

    None where the blocks of the mode are not compared, or where there are no float64 results. A model that refuses the
    mode is noted in `exact.failures`; an adapter that PEFT does not merge or disable is not.
    """
    is_compared = mode in _block_modes(context, model)
    try:
        with model_code(model):  # the model's code may insist on its own dtype
            if mode != MERGED:  # in exact arithmetic a merged adapter is the same function
                with context.events.passes(titles.exact(mode)):
                    context.events.step(titles.exact(mode), 0, 1)
                    _compute_in_float64(
                        model,
                        inputs,
                        mode,
                        exact,
                        by_blocks=is_compared,
                        end_inputs=end_inputs,
                        began=context.events.block,
                    )
            if not is_compared or _exact_mode(mode) in exact.failures:
                return None
            with context.events.passes(titles.noise(mode)):
                return _draw(context, model, inputs, mode, exact)
    except (MergeRefusedError, DisableRefusedError):
        return None  # each worker says so itself
    except Skip as skip:
        exact.failures[mode] = str(skip)
        return None


def _compute_in_float64(
    model: torch.nn.Module,
    inputs: Activations,
    mode: str,
    exact: Exact,
    *,
    by_blocks: bool,
    end_inputs: Activations,
    began: BlockBegan,
) -> None:
    """Compute a mode in float64 into `exact`: by blocks, on values that it rounds itself, and from end to end."""
    dtype = next(p.dtype for p in model.parameters() if p.dtype in UNIT_ROUNDOFF)

    def given(name: str, value: torch.Tensor) -> torch.Tensor:
        # rounded once: workers get these values in the tested dtype, and their exact results have to come from the same
        block_input = exact.given[given_name(mode, name)] = rounded(value, dtype)
        return block_input.to(value.dtype)

    def take(place: ResultPlace, result: torch.Tensor) -> None:
        exact.results[f"{mode}::{place}"] = as_exact(result, dtype)

    def compute() -> Activations:
        if by_blocks:
            with deciding(exact.track.exact(mode), gradient=False):
                run_by_blocks(model, inputs, given, take, began=began)
        with deciding(exact.track.exact(f"{mode}.{END_TO_END}"), gradient=False):
            return activations(model, end_inputs)

    with torch.no_grad(), exact_layers(model), Float64Mode():
        ends = in_mode(model, mode, compute)
    exact.ends.update({f"{mode}::{name}": tensor.to(torch.float64) for name, tensor in ends.items()})


def _draw(context: Context, model: torch.nn.Module, inputs: Activations, mode: str, exact: Exact) -> PassReaders:
    """Compute a mode with noise, on the exact pass's block inputs and decisions; return readers of the noisy passes."""
    kernels = half_kernels.replacement(model, tokens_of(inputs))
    given = functools.partial(Reference.of_this_process(exact.given).given_value, _exact_mode(mode))

    def compute(title: str) -> Results:
        results: Results = {}

        def take(place: ResultPlace, result: torch.Tensor) -> None:
            results[str(place)] = result.detach()

        def run_blocks() -> None:
            with deciding(exact.track.other(_exact_mode(mode), title), gradient=False):
                run_by_blocks(model, inputs, given, take, began=context.events.block)

        with half_kernels.computing(kernels):
            in_mode(model, mode, run_blocks)
        return results

    truth = _results_of_mode(exact.results, _exact_mode(mode))
    row_counts = [rows_of(tensor) for tensor in truth.values() if tensor.is_floating_point()]
    passes = passes_for(model, tokens_of(inputs), row_counts)
    drawn = draw(context, model, compute, passes, named=_products_suffix(mode))
    if _output_judges(context):
        _draw_ends(context, model, inputs, mode, exact)
    readers: PassReaders = {}
    for title, noisy_passes in drawn.items():
        readers[title] = [results.get for results in noisy_passes]
    return readers


def _draw_ends(context: Context, model: torch.nn.Module, inputs: Activations, mode: str, exact: Exact) -> None:
    """Compute the outputs from end to end with noise into `exact`, for the plug-ins that judge by them.

    Of the passes with the products of each worker, those with this CPU's are kept.
    """
    logits = exact.ends.get(f"{_exact_mode(mode)}::{LOGITS}")
    if logits is not None:
        run_model = functools.partial(in_mode, model, mode, functools.partial(activations, model, inputs))
        passes = passes_for(model, tokens_of(inputs), [rows_of(logits)])
        drawn = draw(context, model, lambda _: run_model(), passes)
        exact.ends_drawn[mode] = drawn[cpu_error.products_on(model, CPU)]


def _results_of_mode(results: Results, mode: str) -> Results:
    """Return the results of a mode by names without it."""
    return {name.removeprefix(f"{mode}::"): value for name, value in results.items() if name.startswith(f"{mode}::")}


def _is_read_by_another_stage(stages: Iterable[Stage]) -> bool:
    """Return whether another stage of the same worker reads the float64 results."""
    return any(standard.FORWARD in (*SPECS[stage].by, *SPECS[stage].reads) for stage in stages)


def _output_judges(context: Context) -> list[OutputJudge]:
    """Return the judges of plug-ins that ask for the outputs of this case."""
    return [*plugins.asked("output_judges", context.job.case)]


def _let_plugins_judge(context: Context, model: torch.nn.Module, inputs: Activations, exact: Exact) -> None:
    """Hand the exact and the noisy outputs to the plug-ins that judge by them."""
    judges = _output_judges(context)
    if not judges:
        return
    ends = {mode: exact.ends[f"{mode}::{LOGITS}"] for mode in (ON, OFF) if f"{mode}::{LOGITS}" in exact.ends}
    drawn: dict[str, list[torch.Tensor]] = {}
    for mode, noisy_passes in exact.ends_drawn.items():
        drawn[mode] = [ends_of_pass[LOGITS] for ends_of_pass in noisy_passes]
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


def _decisions_file(context: Context) -> Path:
    """Return the path of the file with the decisions of the exact pass."""
    return context.scratch / DECISIONS_FILE.format("forward")


def _products_suffix(mode: str) -> str:
    """Return the end of the name of a device's products in a mode: a merged adapter has errors of its own."""
    return ", merged" if mode == MERGED else ""


def _modes(context: Context) -> list[str]:
    """Return the modes in which the model runs; one without an adapter, and one that merges nothing, has fewer."""
    if context.job.case.adapter is None:
        return [OFF]
    # an adapter without layers, as a prompt, has nothing to merge
    has_adapted_layer = any(True for _ in adapted_layers(context.model))
    return [ON, OFF, MERGED] if has_adapted_layer else [ON, OFF]


def _block_modes(context: Context, model: torch.nn.Module) -> list[str]:
    """Return the modes whose blocks are compared: all, or of a large model the first: adapter on, where one is given.

    The same weights are multiplied by the same kernels without it, and the stage `merged` judges merged weights.
    """
    modes = _modes(context)
    is_small = matrix_elements(model) <= context.job.case.plan.float64_merges
    return modes if is_small else modes[:1]


def in_mode(model: Any, mode: str, run: Callable[[], T]) -> T:
    """Put the model into a mode, and return what `run` returns in it."""
    if mode == MERGED:
        return in_merged(model, run)
    is_disabled = mode == OFF and hasattr(model, "peft_config")
    with disabled(model) if is_disabled else nullcontext():
        return run()


def _exact_mode(mode: str) -> str:
    """Return the mode whose float64 pass serves a mode: a merged adapter has the one of the adapter on."""
    return ON if mode == MERGED else mode
