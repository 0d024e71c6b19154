"""The content of the tables of every report, without layout: a cell per stage, and the workers that share a row."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from consistency.capture.wording import counted, some
from consistency.case import standard
from consistency.case.load_path import is_alternative
from consistency.case.stages import stage_order
from consistency.comparison.by_worker import is_larger
from consistency.comparison.outcomes import group_by_key, union_of_workers
from consistency.comparison.result import BAD, Comparison, TensorComparison
from consistency.comparison.suite import SuiteVerdict
from consistency.report.marks import MARKS, key
from consistency.text import one_line

MOST_LINES = 8
"""Lines of one architecture: a person takes in that many; a fleet may have as many different results as workers."""

MOST_COLUMNS = 64
"""Workers that a reader can look through one by one: eight hosts of eight devices. Of more, the rows of the table
are shown."""

_MOST_CLASSES = 4

_FIGURES = {
    "within": " (worst error/tolerance; memory: value/limit)",
    "outside": " (failed/total tensors, or first failing layer)",
    "blocked": " (such/all tensors)",
}
"""Explanation of the text beside the mark in a cell, by kind of cell."""


def _legend_rows(*kinds: str) -> Iterator[tuple[str, str, str]]:
    for kind, mark, meaning in key(kinds):
        yield kind, mark, meaning + _FIGURES.get(kind, "")


LEGEND = (
    *_legend_rows("equal", "within"),
    ("rounding", "≤ 1.00", "correct rounding alone may use the whole tolerance of a half type"),
    *_legend_rows("outside", "blocked", "flagged", "elsewhere", "none"),
)
"""Kind of a cell, its mark, and the meaning of the mark."""

NEARLY_ALL = 0.9  # of a tolerance

_ALWAYS = ("equal", "within", "outside", "none")  # kinds of cells that every legend explains


@dataclass(slots=True, kw_only=True)
class Cell:
    """The rows of one worker in one stage.

    Attributes
    ----------
    counts : dict
        Number of tensors by status.
    worst_ratio : float or None
        Largest error/tolerance; NaN is larger than any number. None where none was measured.
    worst_layer : str
        The first layer with that ratio.
    first_bad : str or None
        Layer of the first tensor with a mismatch.
    first_place : int
        Index of that tensor among all.
    flag : str
        Kind of an error that is about the stage of this worker although no tensor has a mismatch: `drift`, …
    elsewhere : str
        The case of the suite in which the stage was checked for this case too: it is about the host alone.
    """

    counts: dict[str, int] = field(default_factory=dict)
    worst_ratio: float | None = None
    worst_layer: str = ""
    first_bad: str | None = None
    first_place: int = 0
    flag: str = ""
    elsewhere: str = ""

    @property
    def total(self) -> int:
        """Return the number of tensors."""
        return sum(self.counts.values())

    @property
    def bad(self) -> int:
        """Return the number of tensors with a mismatch."""
        return sum(count for status, count in self.counts.items() if status in BAD)

    def take_ratio(self, ratio: float | None, layer: str) -> None:
        """Keep a ratio and its layer, if it is the largest so far."""
        if ratio is None:
            return
        if self.worst_ratio is None or is_larger(ratio, self.worst_ratio):
            self.worst_ratio, self.worst_layer = float(ratio), layer


@dataclass(frozen=True, slots=True, kw_only=True)
class CellText:
    """A cell of a table of workers or of cases.

    Attributes
    ----------
    kind : str
        A kind of `LEGEND`, or `blocked`, or `skipped`; a verdict; or `plain`.
    text : str
        The text beside the mark.
    spoken : str
        The whole cell in words, for a screen reader.
    place : str
        The layer at which a mismatch begins, where the order of layers matters.
    worst_layer : str
        The layer of the ratio in the text, in a stage whose layers are judged each by itself.
    is_near : bool
        Whether nearly all of the tolerance is used.
    """

    kind: str
    text: str
    spoken: str
    place: str = ""
    worst_layer: str = ""
    is_near: bool = False

    @property
    def mark(self) -> str:
        """Return the mark of this kind of cell; a verdict and plain text have none."""
        return MARKS[self.kind][0] if self.kind in MARKS else ""

    def written(self, *, place: bool = False, worst_layer: bool = False) -> str:
        """Return the mark and the text.

        With `place` the place of a mismatch is in the text's stead; with `worst_layer` the layer of the ratio follows.
        """
        parts = [self.mark, self.place if place and self.place else self.text]
        if worst_layer:
            parts.append(self.worst_layer)
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table of workers or of cases.

    Attributes
    ----------
    names : tuple of str
        Workers that are bitwise equal, or the case.
    cells : tuple of CellText
        A cell per column.
    architecture, models : str, tuple of str
        The architecture of the workers, and the models of all devices of that architecture. Rows of one architecture
        follow each other, below one heading. Empty in a row of cases.
    kinds : int
        Number of different results; more than 1 where the row sums up all results without a row of their own.
    folder : str or None
        Folder of the case's own report, relative to this one's.
    remark : str
        One sentence on the case.
    """

    names: tuple[str, ...]
    cells: tuple[CellText, ...]
    architecture: str = ""
    models: tuple[str, ...] = ()
    kinds: int = 1
    folder: str | None = None
    remark: str = ""

    @property
    def bad(self) -> bool:
        """Return whether any cell is a mismatch or has an error finding."""
        return any(cell.kind in ("outside", "flagged") for cell in self.cells)


Rows = Mapping[str, Sequence[Row]]
"""The rows of workers by load path."""


def by_architecture(rows: Iterable[Row]) -> list[tuple[Row, ...]]:
    """Return the rows of each architecture, in order; rows of cases are one block."""
    return [tuple(block) for _, block in itertools.groupby(rows, key=lambda row: row.architecture)]


def stages(comparison: Comparison) -> list[str]:
    """Return the stages that were checked, in order; those that this version does not know come last."""
    return sorted(dict.fromkeys(tensor.stage for tensor in comparison.tensors), key=stage_order)


def all_rows(comparison: Comparison) -> dict[str, list[Row]]:
    """Return `rows_of` every load path."""
    return {load_path: rows_of(comparison, load_path) for load_path in comparison.load_paths}


def rows_of(comparison: Comparison, load_path: str) -> list[Row]:
    """Return the rows of the workers on one load path, architecture by architecture, with a cell per stage.

    Workers of one architecture with the same bits, statuses and errors share a row; of more than `MOST_LINES` rows of
    an architecture the worst are kept, and the others become one.
    """
    tensors = [tensor for tensor in comparison.tensors if tensor.load_path == load_path]
    flags = _flags(comparison, load_path)
    models = _models(comparison, load_path, tensors)
    workers_by_architecture: dict[str, list[str]] = {}
    for group in comparison.architectures:
        for name in group.workers:
            if name in models:
                workers_by_architecture.setdefault(group.name, []).append(name)
    signatures = _signatures(tensors)
    lines = {
        architecture: _lines(workers, signatures, flags) for architecture, workers in workers_by_architecture.items()
    }
    cells = _cells(tensors, {workers[0] for members in lines.values() for workers in members})
    for name, flag_by_stage in flags.items():
        for stage, kind in flag_by_stage.items():
            if stage in cells.get(name, {}):
                cells[name][stage].flag = kind
    names = stages(comparison)
    rows = []
    for architecture, members in lines.items():
        architecture_models = tuple(dict.fromkeys(models[name] for name in workers_by_architecture[architecture]))
        for row_lines in _shortened(members, cells, comparison.reference):
            # The workers of a line are alike: the cells of its first one stand for all.
            row_cells = merged(cells.get(workers[0], {}) for workers in row_lines)
            row = Row(
                names=tuple(itertools.chain(*row_lines)),
                cells=tuple(cell_text(stage, row_cells.get(stage)) for stage in names),
                architecture=architecture,
                models=architecture_models,
                kinds=len(row_lines),
            )
            rows.append(row)
    return rows


def _models(comparison: Comparison, load_path: str, tensors: Sequence[TensorComparison]) -> dict[str, str]:
    """Return the model of each worker on a load path, by name.

    A worker of a default load path is on an alternative one too if it has results there.
    """
    also_took = union_of_workers(tensor.workers for tensor in tensors) if is_alternative(load_path) else {}
    return {
        worker.name: worker.model
        for worker in comparison.workers
        if worker.load_path == load_path or worker.name in also_took
    }


def _lines(
    workers: Sequence[str], signatures: Mapping[str, int], flags: Mapping[str, Mapping[str, str]]
) -> list[list[str]]:
    """Return the workers of an architecture line by line; those with the same results and errors share a line."""
    alike = group_by_key(((signatures.get(name, 0), tuple(flags.get(name, {}).items())), name) for name in workers)
    return list(alike.values())


def _shortened(
    lines: Sequence[Sequence[str]], cells: Mapping[str, Mapping[str, Cell]], reference: str | None
) -> list[list[Sequence[str]]]:
    """Return lines of workers for the rows of an architecture: a line per row, and the last row has the other lines.

    Rows of their own are for the reference worker, then for mismatches before others, then for many workers before few.
    """
    if len(lines) <= MOST_LINES:
        return [[workers] for workers in lines]

    def weight(workers: Sequence[str]) -> tuple[bool, int, int]:
        bad = sum(cell.bad or bool(cell.flag) for cell in cells.get(workers[0], {}).values())
        return (reference in workers, bad, len(workers))

    alone = sorted(lines, key=weight, reverse=True)[: MOST_LINES - 1]
    rows = [[workers] for workers in lines if workers in alone]
    return [*rows, [workers for workers in lines if workers not in alone]]


def merged(cells_of_lines: Iterable[Mapping[str, Cell]]) -> dict[str, Cell]:
    """Return cells that sum up the cells of several lines, by stage."""
    sums: dict[str, Cell] = {}
    for cells in cells_of_lines:
        for stage, cell in cells.items():
            total = sums.setdefault(stage, Cell())
            for status, count in cell.counts.items():
                total.counts[status] = total.counts.get(status, 0) + count
            total.flag = total.flag or cell.flag
            total.elsewhere = total.elsewhere or cell.elsewhere
            total.take_ratio(cell.worst_ratio, cell.worst_layer)
            if cell.first_bad is not None and (total.first_bad is None or cell.first_place < total.first_place):
                total.first_bad, total.first_place = cell.first_bad, cell.first_place
    return sums


def legend(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """Return the rows of `LEGEND` that a table of these rows needs."""
    cells = [cell for row in rows for cell in row.cells]
    kinds = {*_ALWAYS, *(cell.kind for cell in cells)}
    if any(cell.is_near for cell in cells):
        kinds.add("rounding")
    return [row for row in LEGEND if row[0] in kinds]


def cell_text(stage: str, cell: Cell | None) -> CellText:
    """Return the text of a cell: its worst status, and the number that belongs to it."""
    if cell is None:
        return CellText(kind="none", text="", spoken="not checked")
    if cell.elsewhere and not cell.counts:
        return CellText(kind="elsewhere", text="", spoken=f"checked in case {one_line(cell.elsewhere)}")
    if cell.bad:
        place = f"from {one_line(cell.first_bad)}" if stage == standard.FORWARD and cell.first_bad else ""
        spoken = f"mismatch in {cell.bad} of {cell.total} tensors {place}".rstrip()
        return CellText(kind="outside", text=f"{cell.bad}/{cell.total}", spoken=spoken, place=place)
    if cell.flag:
        text = one_line(cell.flag)
        return CellText(kind="flagged", text=text, spoken=f"within tolerance, but the finding {text}")
    if "blocked" in cell.counts:
        text = f"blocked {cell.counts['blocked']}/{cell.total}"
        return CellText(kind="blocked", text=text, spoken=f"could not be checked: {text} tensors")
    if "within" in cell.counts and cell.worst_ratio is not None:
        text = ratio_text(cell.worst_ratio)
        spoken = f"within tolerance, worst error/tolerance {text}"
        worst_layer = one_line(cell.worst_layer) if stage == standard.MERGED else ""
        is_near = cell.worst_ratio > NEARLY_ALL
        return CellText(kind="within", text=text, spoken=spoken, worst_layer=worst_layer, is_near=is_near)
    if "equal" in cell.counts or "within" in cell.counts:
        return CellText(kind="equal", text="", spoken="bitwise equal")
    return CellText(kind="skipped", text="skipped", spoken="skipped")


def verdict_cell(verdict: SuiteVerdict) -> CellText:
    """Return the verdict of a case as a cell; its kind is the verdict."""
    return CellText(kind=verdict, text=verdict, spoken=verdict)


def plain_cell(text: str) -> CellText:
    """Return a cell that has nothing to do with agreement."""
    return CellText(kind="plain", text=text, spoken=text)


def ratio_text(ratio: float) -> str:
    """Write error/tolerance: the same figure in the verdict and in the table."""
    return f"{ratio:.2f}"


def class_text(classes: Sequence[Sequence[str]]) -> str:
    """Write classes of agreement as `{cpu, cuda:0} {cuda:1}`, the first few workers of the first few classes."""
    texts = ["{" + some(names, 4) + "}" for names in classes[:_MOST_CLASSES]]
    unnamed_classes = classes[_MOST_CLASSES:]
    if unnamed_classes:
        workers = counted(sum(map(len, unnamed_classes)), "worker")
        texts.append(f"and {workers} in {len(unnamed_classes)} more")
    return " ".join(texts)


def _flags(comparison: Comparison, load_path: str) -> dict[str, dict[str, str]]:
    """Return the kind of the first error about each stage of a worker on a load path, by worker and stage.

    An error that names no load path is about all, unless mismatches show it in the table of another.
    """
    flags: dict[str, dict[str, str]] = {}
    elsewhere: Set[tuple[str, str]] | None = None
    for finding in comparison.findings:
        if finding.severity != "error" or (finding.load_paths and load_path not in finding.load_paths):
            continue
        if elsewhere is None and not finding.load_paths:  # once, and only if needed: it visits every outcome
            elsewhere = _mismatches_elsewhere(comparison, load_path)
        for stage in dict.fromkeys(name.partition("::")[0] for name in finding.tensors):
            for worker in finding.workers:
                if finding.load_paths or elsewhere is None or (stage, worker) not in elsewhere:
                    flags.setdefault(worker, {}).setdefault(stage, finding.kind)
    return flags


def _mismatches_elsewhere(comparison: Comparison, load_path: str) -> Set[tuple[str, str]]:
    """Return the pairs of a stage and a worker with a mismatch on another load path."""
    others = [tensor for tensor in comparison.tensors if tensor.load_path != load_path]
    wrong = group_by_key(
        (tensor.stage, row.workers) for tensor in others for row in tensor.outcomes if row.status in BAD
    )
    return {(stage, worker) for stage, sets in wrong.items() for worker in union_of_workers(sets)}


def _signatures(tensors: Sequence[TensorComparison]) -> dict[str, int]:
    """Return a number per worker; equal for workers of the same class and status in every tensor.

    The number of a worker stands for all of its rows so far: with each tensor it becomes the number of the pair of
    itself and the next row.
    """
    numbers: dict[tuple[int, int, int, str], int] = {}
    signatures: dict[str, int] = {}
    seen_partitions: set[object] = set()
    for index, tensor in enumerate(tensors):
        partition = (tensor.classes, tuple((row.status, row.workers) for row in tensor.outcomes))
        if partition in seen_partitions:  # splits no workers that an earlier tensor has not split
            continue
        seen_partitions.add(partition)
        classes = {name: number for number, names in enumerate(tensor.classes) for name in names}
        for row in tensor.outcomes:
            for worker in row.workers:
                pair = (signatures.get(worker, 0), index, classes.get(worker, -1), row.status)
                signatures[worker] = numbers.setdefault(pair, len(numbers) + 1)
    return signatures


def _cells(tensors: Sequence[TensorComparison], workers: Set[str]) -> dict[str, dict[str, Cell]]:
    """Return the cells of these workers, by worker and stage."""
    cells: dict[str, dict[str, Cell]] = {}
    # Most rows have one of a few sets of workers.
    chosen_workers = functools.cache(lambda names: [name for name in names if name in workers])
    for index, tensor in enumerate(tensors):
        for row in tensor.outcomes:
            for worker in chosen_workers(row.workers):
                cell = cells.setdefault(worker, {}).setdefault(tensor.stage, Cell())
                cell.counts[row.status] = cell.counts.get(row.status, 0) + 1
                cell.take_ratio(row.share, tensor.layer)
                if row.status in BAD and cell.first_bad is None:
                    cell.first_bad, cell.first_place = tensor.layer, index
    return cells
