"""NaN and infinities in a file or in exact results: equal bits there are no agreement of numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from consistency.capture.records import TensorRecord
from consistency.capture.wording import counted, listed, some
from consistency.case.stages import Stage
from consistency.comparison.judge import NOT_FINITE
from consistency.comparison.kinds import FindingKind
from consistency.comparison.records import tables_of
from consistency.comparison.result import Finding, TensorComparison
from consistency.comparison.workers import ComparedWorker, in_order_of

_MOST = 3
_NEXT = "save it again from a training run whose loss is finite: PEFT merges no such layer with safe_merge=True"


def find_not_finite(compared: Sequence[ComparedWorker], tensors: Sequence[TensorComparison]) -> Iterator[Finding]:
    """Report tensors without a number to compare with, and files that hold such values.

    Where the file has none and the others of a tensor were compared, it is a note: an output may rule words out by −∞.
    """
    in_files, in_part = _in_files(compared), _in_part(compared)
    where = "; ".join(f"in the {file}: {some(places, _MOST)}" for file, places in in_files.items())
    unknown = [(t, outcome.workers) for t in tensors for outcome in t.outcomes if outcome.reason == NOT_FINITE]
    if unknown:
        count = Counter(stage for stage, _ in dict.fromkeys((t.stage, t.name) for t, _ in unknown))
        first = unknown[0][0]
        what = listed([f"{counted(number, 'tensor')} of {stage}" for stage, number in count.items()])
        message = f"nothing was compared in {what}: {NOT_FINITE}, first in {first.tensor} of {first.layer}"
        yield Finding(
            kind=FindingKind.NOTHING_COMPARED,
            severity="error",
            message=f"{message}; {where}" if where else message,
            workers=tuple(in_order_of(compared, dict.fromkeys(name for _, names in unknown for name in names))),
            tensors=tuple(dict.fromkeys(t.name for t, _ in unknown)),
            detail=in_part,
            next=_NEXT if where else None,
        )
    elif where or in_part:
        message = f"values are NaN or infinite {where}" if where else f"NaN or infinite in float64 too: {in_part[0]}"
        yield Finding(
            kind=FindingKind.NON_FINITE_VALUES,
            severity="warning" if where else "note",
            message=message,
            workers=tuple(dict.fromkeys(p.label for p in compared)),
            detail=in_part,
            next=_NEXT if where else None,
        )


def _in_files(compared: Sequence[ComparedWorker]) -> dict[str, list[str]]:
    """Return what of the files is NaN or infinite, by file."""
    found: dict[str, dict[str, None]] = {}
    for record in _records(compared):
        if record.not_finite:
            file = "adapter's file" if record.stage == Stage.ADAPTER else "base's files"
            values = f"{record.not_finite} of {counted(math.prod(record.shape), 'value')}"
            found.setdefault(file, {})[f"{values} of {record.tensor} of {record.layer}"] = None
    return {file: list(places) for file, places in found.items()}


def _in_part(compared: Sequence[ComparedWorker]) -> tuple[str, ...]:
    """Return the tensors that have values without a number beside others, a line per stage."""
    by_stage: dict[str, dict[str, None]] = {}
    for record in _records(compared):
        seen = record.measure
        if seen is not None and 0 < seen.not_finite < seen.elements:
            place = f"{seen.not_finite} of {seen.elements} values of {record.tensor} of {record.layer}"
            by_stage.setdefault(record.stage, {})[place] = None
    return tuple(f"{stage} · not compared: {some(list(places), _MOST)}" for stage, places in by_stage.items())


def _records(compared: Sequence[ComparedWorker]) -> Iterator[TensorRecord]:
    for table in tables_of(p.records for p in compared):
        yield from table.values()
