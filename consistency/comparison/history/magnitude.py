"""How far results drifted, where the capture of the earlier run is still at hand.

A capture stores errors against the exact values and digests, and not the tensors themselves. Two results that are off
by a and by b from the same exact values are at most a + b apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.comparison.history.records import WorkerRecord
from consistency.comparison.outcomes import Outcome
from consistency.comparison.result import Comparison, tensor_name
from consistency.errors import CaptureError


def magnitude(comparison: Comparison, worker: WorkerRecord, tensors: Sequence[str], report: str) -> str:
    """Return a sentence about the drifted tensor that is furthest from the exact values; empty where none is known.

    `report` is the folder of the earlier run's report.
    """
    before = _errors(worker, set(tensors), report)
    known = [
        (row, name)
        for one in comparison.tensors
        if one.load_path == worker.load_path and (name := one.name) in before
        for row in one.outcomes
        if worker.name in row.workers and row.max_abs is not None and row.reference not in (None, "file")
    ]
    if not known:
        return ""
    row, name = max(known, key=_share)
    here, there = float(row.max_abs or 0), before[name]
    allowed = f", allowed {float(row.allowed):.2g}" if row.allowed else ""
    return (
        f"{name}: off from the exact values by at most {here:.2g} in this run{allowed}, and {there:.2g} in the earlier "
        f"one, so by at most {here + there:.2g} between the two"
    )


def _share(found: tuple[Outcome, str]) -> float:
    row, _ = found
    return float(row.max_abs or 0) if row.ratio is None else float(row.ratio)


def _errors(worker: WorkerRecord, tensors: set[str], report: str) -> dict[str, float]:
    """Return the largest error of each of these tensors in the earlier run, where that was measured."""
    if not report or not Path(report).is_dir():
        return {}
    try:
        capture = read_capture(Path(report))
    except CaptureError:
        return {}
    of_worker = (one for one in capture.workers if one.info.name == worker.name)
    records = (record for one in of_worker for part in one.parts for record in part)
    return {
        name: float(record.measure.max_abs)
        for record in records
        if record.measure is not None and _load_path(record, worker) and (name := tensor_name(*record.key)) in tensors
    }


def _load_path(record: TensorRecord, worker: WorkerRecord) -> bool:
    return record.load_path in ("", worker.load_path)
