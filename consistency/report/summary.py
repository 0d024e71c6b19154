"""What the tables of every report show: one cell per stage and worker, and which workers share a line. No layout."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from consistency.capture.wording import counted, some
from consistency.case import standard
from consistency.case.load_path import is_alternative
from consistency.case.stages import stage_order
from consistency.comparison.by_worker import is_larger
from consistency.comparison.outcomes import gathered, names_in
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
"""What stands beside the mark in a cell."""

LEGEND = (
    *((kind, mark, meaning + _FIGURES.get(kind, "")) for kind, mark, meaning in key(("equal", "within"))),
    ("rounding", "≤ 1.00", "correct rounding alone may use the whole tolerance of a half type"),
    *(
        (kind, mark, meaning + _FIGURES.get(kind, ""))
        for kind, mark, meaning in key(("outside", "blocked", "flagged", "elsewhere", "none"))
    ),
)
"""Kind of a cell, its mark, and what it means."""

NEARLY_ALL = 0.9  # of a tolerance

_ALWAYS = ("equal", "within", "outside", "none")


@dataclass(slots=True, kw_only=True)
class Cell:
    """The rows of one worker in one stage."""

    counts: dict[str, int] = field(default_factory=dict)  # tensors by status
    worst_ratio: float | None = None  # largest `ratio`; NaN is larger than any number
    worst_layer: str = ""  # the first layer with that ratio
    first_bad: str | None = None  # layer of the first tensor with a mismatch
    first_place: int = 0  # place of that tensor among all
    # kind of an error that is about the stage of this worker although no tensor has a mismatch: `drift`, …
    flag: str = ""
    # the case of the suite in which the stage was checked for this one too: it is about the host alone
    elsewhere: str = ""

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def bad(self) -> int:
        return sum(n for status, n in self.counts.items() if status in BAD)

    def take_ratio(self, ratio: float | None, layer: str) -> None:
        """Note a `ratio` and its layer, if it is the largest so far."""
        if ratio is None:
            return
        if self.worst_ratio is None or is_larger(ratio, self.worst_ratio):
            self.worst_ratio, self.worst_layer = float(ratio), layer


@dataclass(frozen=True, slots=True, kw_only=True)
class CellText:
    """A cell of a table of workers or of cases."""

    kind: str  # of `LEGEND`, or `blocked`, or `skipped`; a verdict; or `plain`
    text: str
    spoken: str  # the whole cell in words, for a screen reader
    place: str = ""  # the layer at which a mismatch begins, where the order of layers matters
    worst_layer: str = ""  # the layer of the ratio in the text, of a stage whose layers are judged each by itself
    is_near: bool = False  # nearly all of the tolerance is used

    @property
    def mark(self) -> str:
        """Return the mark of its kind; a verdict and plain text have none."""
        return MARKS[self.kind][0] if self.kind in MARKS else ""

    def written(self, *, place: bool = False, worst_layer: bool = False) -> str:
        """Return mark and text, or the place in the text's stead, and the layer of the ratio behind it if asked for."""
        parts = [self.mark, self.place if place and self.place else self.text]
        if worst_layer:
            parts.append(self.worst_layer)
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table."""

    names: tuple[str, ...]  # workers that are bitwise equal, or the case
    cells: tuple[CellText, ...]
    # architecture, models: of the workers, and of all devices of that architecture; rows with the same one follow each
    # other, below one heading. Empty of a case
    architecture: str = ""
    models: tuple[str, ...] = ()
    kinds: int = 1  # more than 1 where the row sums up all results without a row of their own
    folder: str | None = None  # of the case's own report, relative to this one's
    remark: str = ""  # one sentence on the case

    @property
    def bad(self) -> bool:
        """Return whether any cell is a mismatch or has an error finding."""
        return any(cell.kind in ("outside", "flagged") for cell in self.cells)


Rows = Mapping[str, Sequence[Row]]
"""The rows of workers by load path."""


def by_architecture(rows: Iterable[Row]) -> list[tuple[Row, ...]]:
    """Return the rows below each heading; those of cases are below one."""
    return [tuple(below) for _, below in itertools.groupby(rows, key=lambda row: row.architecture)]


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
    signatures = _signatures(tensors)
    flags = _flags(comparison, load_path)
    models: dict[str, list[str]] = {}
    same: dict[str, dict[object, list[str]]] = {}
    took = names_in(tensor.workers for tensor in tensors) if is_alternative(load_path) else {}
    here = {w.name: w.model for w in comparison.workers if w.load_path == load_path or w.name in took}
    for architecture in comparison.architectures:
        for name in architecture.workers:
            if name in here:
                models.setdefault(architecture.name, []).append(here[name])
                signature = (signatures.get(name, 0), tuple(flags.get(name, {}).items()))
                same.setdefault(architecture.name, {}).setdefault(signature, []).append(name)
    cells = _cells(tensors, {workers[0] for lines in same.values() for workers in lines.values()})
    for name, by_stage in flags.items():
        for stage, kind in by_stage.items():
            if stage in cells.get(name, {}):
                cells[name][stage].flag = kind
    names = stages(comparison)
    rows = []
    for title, lines in same.items():
        of_title = tuple(dict.fromkeys(models[title]))
        for members in _shortened(list(lines.values()), cells, comparison.reference):
            own = merged(cells.get(workers[0], {}) for workers in members)
            texts = tuple(cell_text(stage, own.get(stage)) for stage in names)
            row = Row(
                names=tuple(itertools.chain(*members)),
                cells=texts,
                architecture=title,
                models=of_title,
                kinds=len(members),
            )
            rows.append(row)
    return rows


def _shortened(
    lines: Sequence[Sequence[str]], cells: Mapping[str, Mapping[str, Cell]], reference: str | None
) -> list[list[Sequence[str]]]:
    """Give a row to the reference worker, mismatches before others, many workers before few; the rest share one."""
    if len(lines) <= MOST_LINES:
        return [[workers] for workers in lines]

    def weight(workers: Sequence[str]) -> tuple[bool, int, int]:
        bad = sum(cell.bad or bool(cell.flag) for cell in cells.get(workers[0], {}).values())
        return (reference in workers, bad, len(workers))

    kept = sorted(lines, key=weight, reverse=True)[: MOST_LINES - 1]
    return [*([workers] for workers in lines if workers in kept), [workers for workers in lines if workers not in kept]]


def merged(many: Iterable[Mapping[str, Cell]]) -> dict[str, Cell]:
    """Return cells that sum up those of several lines."""
    found: dict[str, Cell] = {}
    for cells in many:
        for stage, cell in cells.items():
            into = found.setdefault(stage, Cell())
            for status, count in cell.counts.items():
                into.counts[status] = into.counts.get(status, 0) + count
            into.flag = into.flag or cell.flag
            into.elsewhere = into.elsewhere or cell.elsewhere
            into.take_ratio(cell.worst_ratio, cell.worst_layer)
            if cell.first_bad is not None and (into.first_bad is None or cell.first_place < into.first_place):
                into.first_bad, into.first_place = cell.first_bad, cell.first_place
    return found


def legend(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """Return the rows of `LEGEND` that a table of these rows needs."""
    cells = [cell for row in rows for cell in row.cells]
    kinds = {*_ALWAYS, *(cell.kind for cell in cells), *(["rounding"] if any(cell.is_near for cell in cells) else [])}
    return [row for row in LEGEND if row[0] in kinds]


def cell_text(stage: str, cell: Cell | None) -> CellText:
    """Return the worst that workers saw in a stage."""
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
    """Return a cell that says nothing of agreement."""
    return CellText(kind="plain", text=text, spoken=text)


def ratio_text(ratio: float) -> str:
    """Write error/tolerance: the same figure in the verdict and in the table."""
    return f"{ratio:.2f}"


def class_text(classes: Sequence[Sequence[str]]) -> str:
    """Write classes of agreement as `{cpu, cuda:0} {cuda:1}`, the first few workers of the first few classes."""
    texts = ["{" + some(names, 4) + "}" for names in classes[:_MOST_CLASSES]]
    others = classes[_MOST_CLASSES:]
    if others:
        texts.append(f"and {counted(sum(map(len, others)), 'worker')} in {len(others)} more")
    return " ".join(texts)


def _flags(comparison: Comparison, load_path: str) -> dict[str, dict[str, str]]:
    """Return the kind of the first error about each stage of a worker on a load path, by worker and stage.

    An error that names no load path is about all, unless mismatches show it in the table of another.
    """
    found: dict[str, dict[str, str]] = {}
    elsewhere: Set[tuple[str, str]] | None = None
    for finding in comparison.findings:
        if finding.severity != "error" or (finding.load_paths and load_path not in finding.load_paths):
            continue
        if elsewhere is None and not finding.load_paths:
            elsewhere = _mismatches_elsewhere(comparison, load_path)
        for stage in dict.fromkeys(name.partition("::")[0] for name in finding.tensors):
            for worker in finding.workers:
                if finding.load_paths or elsewhere is None or (stage, worker) not in elsewhere:
                    found.setdefault(worker, {}).setdefault(stage, finding.kind)
    return found


def _mismatches_elsewhere(comparison: Comparison, load_path: str) -> Set[tuple[str, str]]:
    """Return the stages and workers with a mismatch on another load path."""
    others = [tensor for tensor in comparison.tensors if tensor.load_path != load_path]
    wrong = gathered((tensor.stage, row.workers) for tensor in others for row in tensor.outcomes if row.status in BAD)
    return {(stage, worker) for stage, sets in wrong.items() for worker in names_in(sets)}


def _signatures(tensors: Sequence[TensorComparison]) -> dict[str, int]:
    """Return a number per worker; equal for workers of the same class and status in every tensor."""
    numbers: dict[tuple[int, int, int, str], int] = {}  # by a worker's rows so far, and the next one
    found: dict[str, int] = {}
    known: set[object] = set()  # tensors at which the same workers are alike tell nothing new
    for place, tensor in enumerate(tensors):
        alike = (tensor.classes, tuple((row.status, row.workers) for row in tensor.outcomes))
        if alike in known:
            continue
        known.add(alike)
        classes = {name: number for number, names in enumerate(tensor.classes) for name in names}
        for row in tensor.outcomes:
            for worker in row.workers:
                mark = (found.get(worker, 0), place, classes.get(worker, -1), row.status)
                found[worker] = numbers.setdefault(mark, len(numbers) + 1)
    return found


def _cells(tensors: Sequence[TensorComparison], workers: Set[str]) -> dict[str, dict[str, Cell]]:
    """Return the cells of these workers, by worker and stage."""
    found: dict[str, dict[str, Cell]] = {}
    wanted = functools.cache(lambda names: [name for name in names if name in workers])
    for place, tensor in enumerate(tensors):
        for row, worker in ((one, worker) for one in tensor.outcomes for worker in wanted(one.workers)):
            cell = found.setdefault(worker, {}).setdefault(tensor.stage, Cell())
            cell.counts[row.status] = cell.counts.get(row.status, 0) + 1
            cell.take_ratio(row.share, tensor.layer)
            if row.status in BAD and cell.first_bad is None:
                cell.first_bad, cell.first_place = tensor.layer, place
    return found
