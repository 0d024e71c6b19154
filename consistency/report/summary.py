"""What the tables of every report show: one cell per stage and worker, and which workers share a line. No layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from consistency.case import Stage
from consistency.comparison import BAD, Comparison, TensorComparison, WorkerSummary


@dataclass(slots=True, kw_only=True)
class Cell:
    """What one worker saw in one stage.

    Attributes
    ----------
    counts : dict of str to int
        Tensors by status.
    worst_ratio : float or None
        Largest `bound_ratio`; NaN is larger than any number.
    first_bad : str or None
        Layer of the first tensor that is outside, missing or unexpected.
    """

    counts: dict[str, int] = field(default_factory=dict)
    worst_ratio: float | None = None
    first_bad: str | None = None

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def bad(self) -> int:
        return sum(n for status, n in self.counts.items() if status in BAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Workers that agree to the bit in everything, and their cells by stage."""

    workers: tuple[str, ...]
    cells: dict[str, Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """An architecture with one line per kind of behaviour."""

    architecture: str
    models: tuple[str, ...]
    lines: tuple[Line, ...]


def stages(comparison: Comparison) -> list[str]:
    """Return the stages that were looked at, in order."""
    seen = {tensor.stage for tensor in comparison.tensors}
    return [stage.value for stage in Stage if stage.value in seen]


def groups(comparison: Comparison, road: str) -> list[Group]:
    """Return the architectures on one road; workers with the same bits and cells share a line."""
    tensors = [tensor for tensor in comparison.tensors if tensor.road == road]
    signatures = _signatures(tensors)
    found = []
    for architecture in comparison.architectures:
        members = [w for w in comparison.workers if w.name in architecture.workers and w.road == road]
        by_signature: dict[tuple[int, ...], list[WorkerSummary]] = {}
        for worker in members:
            by_signature.setdefault(signatures.get(worker.name, ()), []).append(worker)
        lines = []
        for alike in by_signature.values():
            names = tuple(worker.name for worker in alike)
            lines.append(Line(workers=names, cells=_cells(tensors, names[0])))
        if members:
            models = tuple(dict.fromkeys(worker.model for worker in members))
            found.append(Group(architecture=architecture.name, models=models, lines=tuple(lines)))
    return found


def worst_ratio(comparison: Comparison) -> float | None:
    """Return the largest `bound_ratio` of the comparison, NaN before any number; None where nothing has one."""
    ratios = [float(r.bound_ratio) for t in comparison.tensors for r in t.rows if r.bound_ratio is not None]
    if not ratios:
        return None
    return math.nan if any(math.isnan(r) for r in ratios) else max(ratios)


def _signatures(tensors: Sequence[TensorComparison]) -> dict[str, tuple[int, ...]]:
    """Return, per worker, the number of its class in every tensor, and the statuses that are no class."""
    marks: dict[str, list[int]] = {}
    statuses: dict[str, int] = {}
    for place, tensor in enumerate(tensors):
        classes = {name: number for number, names in enumerate(tensor.classes) for name in names}
        for row in tensor.rows:
            code = statuses.setdefault(row.status, -1 - len(statuses))
            marks.setdefault(row.worker, []).extend((place, classes.get(row.worker, -1), code))
    return {name: tuple(found) for name, found in marks.items()}


def _cells(tensors: Sequence[TensorComparison], worker: str) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for tensor in tensors:
        row = tensor.row(worker)
        if row is None:
            continue
        cell = cells.setdefault(tensor.stage, Cell())
        cell.counts[row.status] = cell.counts.get(row.status, 0) + 1
        if row.bound_ratio is not None:
            ratio = float(row.bound_ratio)
            if cell.worst_ratio is None or math.isnan(ratio) or ratio > cell.worst_ratio:
                cell.worst_ratio = ratio
        if row.status in BAD and cell.first_bad is None:
            cell.first_bad = tensor.layer
    return cells
