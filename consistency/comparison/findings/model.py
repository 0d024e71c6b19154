"""Findings about adapter and base that hold even where all devices agree: no effect, quantized weights."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from consistency.capture.names import (
    ADAPTER_OFF,
    ADAPTER_ON,
    AFTER_A_PASS,
    DELTA,
    END_TO_END,
    RANK_AND_SCALING,
    SETTINGS_LAYER,
)
from consistency.capture.records import TensorRecord
from consistency.capture.wording import counted, some
from consistency.case import standard
from consistency.case.stage import Stage
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.outcomes import group_by_key
from consistency.comparison.records import StageTable
from consistency.comparison.result import Finding
from consistency.comparison.workers import ComparedWorker, labels_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    """The outputs of the whole model on one worker, each with the adapter on and off."""

    are_equal: bool  # whether all of them are bitwise equal with the adapter on and off
    count: int


def find_no_effect(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report an adapter that changes nothing on any worker of its capture, with the cause where it is known."""
    with_adapter = (
        worker for worker in evidence.workers if worker.case.adapter is not None and worker.info.status == "ok"
    )
    outputs_of = functools.cache(_outputs)  # workers that recorded the same share a table
    for workers in group_by_key((id(worker.capture), worker) for worker in with_adapter).values():
        tables = [worker.records.stage(standard.FORWARD) for worker in workers if not worker.case.only]
        outputs = [table_outputs for table_outputs in map(outputs_of, tables) if table_outputs is not None]
        # an effect on one worker is enough: where others lack it, they differ from that one
        if any(not table_outputs.are_equal for table_outputs in outputs):
            continue
        cause = next(filter(None, map(_cause, workers)), "")
        equal_outputs = _about_equal_outputs(outputs, workers)
        if cause or equal_outputs:
            yield _report_no_effect(workers, cause, equal_outputs)


def _report_no_effect(workers: Sequence[ComparedWorker], cause: str, equal_outputs: str) -> Finding:
    """Report an adapter without effect.

    Parameters
    ----------
    workers : sequence of ComparedWorker
        All workers of one capture.
    cause, equal_outputs : str
        Why the adapter can change nothing, and that outputs are equal with and without it; one may be empty.
    """
    labels = labels_of(workers)
    opening = f"adapter · {some(labels)} · the adapter changes nothing"
    unused_layers: list[str] = []
    # deltas that a merge adds, and outputs that do not change: the model does not call these layers
    if not cause:
        unused_layers = list(dict.fromkeys(itertools.chain.from_iterable(map(_layers_with_delta, workers))))
    unused = f"the deltas are not zero, so the model leaves out {some(unused_layers)}" if unused_layers else ""
    advice = "check that this is the trained adapter, and that the model calls its layers"
    if unused_layers:
        advice = "look in the model's code for what reads the weight of these layers itself, and have it call them"
    statements = filter(None, (cause, equal_outputs, unused))
    return Finding(
        kind=kinds.NO_EFFECT,
        severity="warning",
        message=f"{opening}: {'; '.join(statements)}",
        general=opening,
        workers=labels,
        cause=cause or unused or None,
        detail=(f"adapter {workers[0].case.adapter}",),
        next=advice,
    )


def _outputs(table: StageTable) -> _Outputs | None:
    """Compare the outputs of the whole model with the adapter on with those with it off.

    None where that shows nothing: it did not run in both modes, or in part, or its values are not finite.
    """
    pairs = []
    for (stage, layer, tensor), on in table.items():
        if tensor != f"{ADAPTER_ON}.{END_TO_END}" or on.digest is None:
            continue
        off = table.get((stage, layer, f"{ADAPTER_OFF}.{END_TO_END}"))
        if off is not None and off.digest is not None:
            pairs.append((on, off))
    are_finite = all(on.measure is None or math.isfinite(float(on.measure.max_abs)) for on, _ in pairs)
    if not pairs or not are_finite:
        return None
    return _Outputs(are_equal=all(on.digest == off.digest for on, off in pairs), count=len(pairs))


def _about_equal_outputs(outputs: Sequence[_Outputs], workers: Sequence[ComparedWorker]) -> str:
    """State that outputs are equal with and without the adapter; empty where that shows nothing."""
    if not outputs or not any(map(_acts_on_all_tokens, workers)):
        return ""
    count = max(table_outputs.count for table_outputs in outputs)
    verb = "is" if count == 1 else "are"
    return f"{counted(count, 'output')} with and without it {verb} bitwise equal"


def _cause(worker: ComparedWorker) -> str:
    """Return why the adapter can change nothing, where its file, its settings or its deltas show it; else empty."""
    settings = worker.records.get((standard.ADAPTER, SETTINGS_LAYER, RANK_AND_SCALING))
    if settings is None or settings.status == "outside":  # an error of its own: the adapter is not active
        return ""
    match settings.effect:
        case "no-layer":
            return "no layer of the base is adapted"
        case "zero-scaling":
            return f"{settings.evidence.get('zero')} is zero"
        case "zero-weights":
            return f"{settings.evidence.get('zero')} are zero"
        case "layers":
            merged = worker.records.stage(standard.MERGED)
            deltas = [record for (_, _, tensor), record in merged.items() if tensor == DELTA]
            # a case that checks only some layers says nothing of the deltas of the others
            if deltas and not worker.case.only and all(record.effect == "zero-delta" for record in deltas):
                return f"{len(deltas)} of {len(deltas)} deltas are zero"
    return ""


def _layers_with_delta(worker: ComparedWorker) -> Iterator[str]:
    """Yield the layers whose weight a merge changes."""
    for (_, layer, tensor), record in worker.records.stage(standard.MERGED).items():
        if tensor == DELTA and record.measure is not None and not record.effect:
            yield layer


def _acts_on_all_tokens(worker: ComparedWorker) -> bool:
    """Return whether equal outputs show something: the inputs may lack the tokens that an adapter is for."""
    settings = worker.records.get((standard.ADAPTER, SETTINGS_LAYER, RANK_AND_SCALING))
    return settings is not None and settings.status != "outside" and settings.effect != "some-tokens"


def find_quantized(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report the error of requantizing, and weights that a pass leaves in another form."""
    yield from _requantized(evidence.workers)
    yield from _repacked(evidence.workers)


def _requantized(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Compare the error of requantizing with half a step and with the delta that the adapter adds."""
    records_by_worker = _records_by_worker(
        compared, standard.MERGED, lambda record: "error_in_steps_max" in record.evidence
    )
    if not records_by_worker:
        return
    records = list(itertools.chain.from_iterable(records_by_worker.values()))
    steps = max(float(record.evidence["error_in_steps_max"]) for record in records)
    rms = max(float(record.evidence["error_in_steps_rms"]) for record in records)
    ratios = [ratio for ratio in map(_error_over_delta, records) if ratio is not None]
    beside = ""
    if ratios:
        beside = f"; that is {min(ratios):.2g} to {max(ratios):.2g} times the RMS of what the adapter adds"
    # a weight has several records, and workers may have recorded different weights
    weight_counts = (len({record.layer for record in recorded}) for recorded in records_by_worker.values())
    weights = counted(max(weight_counts), "weight")
    labels = tuple(records_by_worker)
    opening = f"merged · {some(labels)} · merging quantizes {weights} again"
    yield Finding(
        kind=kinds.REQUANTIZED,
        severity="note",
        message=f"{opening}: error at most {steps:.2f} steps, RMS {rms:.2f} steps{beside}",
        general=opening,
        workers=labels,
        detail=(
            "a step is the distance of two neighbouring levels; rounding to the nearest makes up to half of one",
            "to keep all of the adapter, leave it unmerged, or dequantize the base, merge into that, and keep 16 bits",
        ),
    )


def _records_by_worker(
    compared: Sequence[ComparedWorker], stage: Stage, is_wanted: Callable[[TensorRecord], bool]
) -> dict[str, list[TensorRecord]]:
    """Return the wanted records of a stage by worker, without workers that have none."""

    @functools.cache  # workers that recorded the same share a table, and so the list of its records
    def records_of(table: StageTable) -> list[TensorRecord]:
        return [record for record in table.values() if is_wanted(record)]

    records_by_worker = {}
    for worker in compared:
        records = records_of(worker.records.stage(stage))
        if records:
            records_by_worker[worker.label] = records
    return records_by_worker


def _error_over_delta(record: TensorRecord) -> float | None:
    """Return the RMS of the error over the RMS of the delta, None where the adapter adds nothing."""
    error, delta = float(record.evidence["error_rms"]), float(record.evidence["delta_rms"])
    return error / delta if delta else None


def _repacked(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Report quantized weights that a forward pass leaves in a form that dequantizes to other values."""
    records_by_worker = _records_by_worker(
        compared, standard.BASE, lambda record: record.tensor == AFTER_A_PASS and record.status != "equal"
    )
    if not records_by_worker:
        return
    labels = tuple(records_by_worker)
    first = records_by_worker[labels[0]][0]
    opening = f"base · {some(labels)} · a forward pass rewrites quantized weights"
    yield Finding(
        kind=kinds.REPACKED_WEIGHTS,
        severity="warning",
        message=f"{opening}, and the library then dequantizes other values: {first.evidence.get('read')}",
        general=opening,
        workers=labels,
        detail=(
            f"seen at {first.layer}: {first.evidence.get('how')}",
            "here every stage starts from the weights as they were loaded",
        ),
        next="merge, save and train before the first pass in eval mode, or load the model again for it",
    )


FINDERS = (
    Finder(name="adapter without effect", phase=Phase.MODEL, position=1, find=find_no_effect),
    Finder(name="quantized weights", phase=Phase.MODEL, position=3, find=find_quantized),
)
