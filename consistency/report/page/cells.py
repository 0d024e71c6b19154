"""Data of the page's table of layers: the result of each tensor on each architecture and worker, in few bytes.

A tensor is `[layer, tensor, shape, dtype, rule]`, five places in a list of strings, and nothing more where every column
is equal. Else `cells` follow, one per architecture of the load path, then `variants`, the distinct things that workers'
columns show of it, and which one each of those shows (-1: none), unless all show the only one or each its own. Devices
with the same bits share a variant, so a page grows with what differs. A cell is None where there is none, or

    [status, ratio, figures, agreement]

where figures are the words of `report/layers.py`, and agreement is `AGREE`, or a place in the strings: which devices of
the architecture agree. A variant is

    [status, class, diagnosis, ratio, max_abs, max_ulp, mismatched, workers that are off]

with what is empty at their end left off; status is a place in `labels.KEY`, diagnosis one in the strings (-1: none).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from consistency.capture.json_codec import json_number
from consistency.capture.wording import some
from consistency.case.stages import stage_order
from consistency.comparison.layers import ByArchitecture, LayerCell, LayerComparison, cells_of
from consistency.comparison.outcomes import Workers, group_by_key, union_of_workers, worst_of
from consistency.comparison.result import BAD, Comparison, Outcome, TensorComparison
from consistency.numerics.rules import Rule
from consistency.report.layers import cell_figures, devices_text
from consistency.report.marks import key
from consistency.report.summary import MOST_COLUMNS, Row
from consistency.text import one_line

KEY = key()
"""Each status, its mark, and its meaning; a status is written as its index in here."""


def digits(value: float | None) -> float | str | None:
    """Return a number rounded to three digits; NaN and infinities, which JSON does not have, as words."""
    return None if value is None else json_number(float(f"{value:.3g}"))


MOST_VARIANTS = 132_000
"""Most cells and variants of a page.

2000 tensors on 64 devices of which no two agree, and on two architectures: at some 36 bytes each below 5 MB.
"""

MOST_TENSORS = 20_000
"""Most tensors of a page: at some 25 bytes and the name of a layer each below 2 MB."""

MIXED = -1
"""Class of a column whose workers are of several classes."""

AGREE = -1
"""Agreement of a cell whose devices, at least two, are bitwise equal."""

_STATUS = {status: index for index, (status, _, _) in enumerate(KEY)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MapColumn:
    """A column of one worker, or of many that are shown as one.

    Attributes
    ----------
    label : str
        Title of the column.
    architecture : str
        Architecture of the workers.
    workers : tuple of str
        Workers whose rows are read: one is enough where all have the same results.
    stands_for : int
        Number of workers that the column is of.
    """

    label: str
    architecture: str
    workers: tuple[str, ...]
    stands_for: int


class Section(msgspec.Struct, kw_only=True):
    """One stage on one load path, as the page's script reads it.

    Attributes
    ----------
    load_path, stage : str
        Names of the load path and the stage.
    total : int
        Number of tensors.
    bad : int
        Number of tensors with a mismatch.
    unchecked : int
        Number of other tensors that some worker did not check.
    unlike : int
        Number of other tensors that are not bitwise equal everywhere.
    checks : bool
        Whether all rows are facts with a limit, and no tensors.
    left_out : int
        Number of tensors for which there was no room.
    rows : list
        Tensors as the module docstring describes them.
    """

    load_path: str
    stage: str
    total: int = 0
    bad: int = 0
    unchecked: int = 0
    unlike: int = 0
    checks: bool = True
    left_out: int = 0
    rows: list[list[Any]] = []


class Strings:
    """Texts of the page, each once; other data has the index of a text in its stead."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._indices: dict[str, int] = {}

    def place(self, text: str) -> int:
        """Return the index of a text, added if it is new."""
        index = self._indices.get(text)
        if index is None:
            index = self._indices[text] = len(self.all)
            self.all.append(one_line(text))
        return index


def columns(comparison: Comparison, load_path: str, rows: Sequence[Row]) -> list[MapColumn]:
    """Return the columns below the architectures of a load path: its workers, or, of many, the rows of the table."""
    workers = {worker.name: worker for worker in comparison.workers if worker.load_path == load_path}
    if len(workers) > MOST_COLUMNS:
        return list(map(_column_of_row, rows))
    with_results = union_of_workers(tensor.workers for tensor in comparison.tensors if tensor.load_path == load_path)
    # A reference file has no rows, and a reference worker may have them on a load path that it did not take.
    names = [name for name, worker in workers.items() if name in with_results or worker.status != "ok"]
    names += [name for name in with_results if name not in workers]
    architecture_of = ByArchitecture(comparison).of
    names.sort(key=lambda name: _architecture_index(comparison, architecture_of.get(name, "")))
    return [
        MapColumn(label=name, architecture=architecture_of.get(name, ""), workers=(name,), stands_for=1)
        for name in names
    ]


def _architecture_index(comparison: Comparison, architecture: str) -> int:
    """Return the index of an architecture; workers of none come last."""
    names = [group.name for group in comparison.architectures]
    return names.index(architecture) if architecture in names else len(names)


def _column_of_row(row: Row) -> MapColumn:
    if row.kinds == 1:
        label, workers = some(row.names, 2), row.names[:1]
    else:
        label, workers = f"{len(row.names)} others", row.names
    return MapColumn(label=label, architecture=row.architecture, workers=workers, stands_for=len(row.names))


def unequal(comparison: Comparison) -> list[LayerComparison]:
    """Return every tensor that is not bitwise equal everywhere, copies and facts among them, by architecture."""
    members = ByArchitecture(comparison)
    return [
        LayerComparison(
            stage=tensor.stage,
            load_path=tensor.load_path,
            layer=tensor.layer,
            tensor=tensor.tensor,
            architectures=cells_of(tensor, members),
        )
        for tensor in comparison.tensors
        if not tensor.is_equal and tensor.outcomes
    ]


def sections(
    comparison: Comparison,
    layers: Iterable[LayerComparison],
    by_load_path: Mapping[str, Sequence[MapColumn]],
    strings: Strings,
) -> list[Section]:
    """Return the data of every stage on every load path, in the order of `Stage`.

    Parameters
    ----------
    comparison : Comparison
        The comparison.
    layers : iterable of LayerComparison
        Those of `unequal`.
    by_load_path : mapping
        Columns of each load path.
    strings : Strings
        Where texts are added.
    """
    sections_by_key: dict[tuple[str, str], Section] = {}
    members = ByArchitecture(comparison)
    unequal_layers = iter(layers)
    architecture_names = {load_path: list(architectures(drawn)) for load_path, drawn in by_load_path.items()}
    workers_of_columns = {load_path: _ColumnWorkers(drawn) for load_path, drawn in by_load_path.items()}
    entries: list[_Entry] = []
    for number, tensor in enumerate(comparison.tensors):
        load_path = tensor.load_path
        key = (load_path, tensor.stage)
        section = sections_by_key.get(key)
        if section is None:
            section = sections_by_key[key] = Section(load_path=one_line(load_path), stage=one_line(tensor.stage))
        section.total += 1
        entry, rank = _entry(tensor, by_load_path[load_path], workers_of_columns[load_path], strings)
        is_among_layers = not tensor.is_equal and tensor.outcomes  # as `unequal` chooses them
        cells = next(unequal_layers).architectures if is_among_layers else None
        if len(entry) > _CELLS:
            cells = cells or cells_of(tensor, members)
            entry[_CELLS] = [_cell(cells.get(name), strings) for name in architecture_names[load_path]]
        section.bad += rank == _BAD
        section.unchecked += rank == _UNCHECKED
        section.unlike += rank == _UNLIKE
        section.checks &= tensor.rule == Rule.LIMIT
        entries.append((rank, number, section, entry))
    for _, _, section, entry in _shortened(entries):
        section.rows.append(entry)
    for section in sections_by_key.values():
        section.left_out = section.total - len(section.rows)
    ordered = sorted(sections_by_key, key=lambda key: (comparison.load_paths.index(key[0]), stage_order(key[1])))
    return [sections_by_key[key] for key in ordered]


def architectures(drawn: Sequence[MapColumn]) -> dict[str, tuple[str, ...]]:
    """Return the architectures of a load path, each with the labels of its columns."""
    labels = group_by_key((column.architecture, column.label) for column in drawn)
    return {name: tuple(names) for name, names in labels.items()}


_BAD, _UNCHECKED, _UNLIKE, _ALIKE = range(4)  # ranks of a tensor, the most important first
_CELLS, _VARIANTS = 5, 6  # indices in an entry


def _cost(entry: Sequence[Any]) -> int:
    """Return the number of cells and variants of an entry."""
    return len(entry[_CELLS]) + len(entry[_VARIANTS]) if len(entry) > _CELLS else 0


def _cell(cell: LayerCell | None, strings: Strings) -> list[Any] | None:
    """Return an architecture's cell as it is written; None where the architecture has no result."""
    if cell is None:
        return None
    figures = cell_figures(cell)
    written: list[Any] = [_STATUS[cell.status], digits(cell.share)]
    written.append(figures if len(figures) > 1 else None)  # a mark alone follows from the status
    if len(cell.classes) > 1:
        written.append(strings.place(devices_text(cell)))
    elif len(cell.workers) > 1 and cell.classes:
        written.append(AGREE)
    while written[-1] is None:
        written.pop()
    return written


_Entry = tuple[int, int, Section, list[Any]]
"""The rank of a tensor, its index among all, its section, and the tensor as it is written."""


def _shortened(entries: list[_Entry]) -> list[_Entry]:
    """Return the entries for which there is room: mismatches before differing tensors before equal ones, in order."""
    cost = sum(_cost(entry) for *_, entry in entries)
    if len(entries) <= MOST_TENSORS and cost <= MOST_VARIANTS:
        return entries
    room = MOST_VARIANTS
    chosen: list[_Entry] = []
    for candidate in sorted(entries, key=lambda ranked: ranked[:2]):
        cost = _cost(candidate[3])
        if len(chosen) < MOST_TENSORS and cost <= room:
            room -= cost
            chosen.append(candidate)
    return sorted(chosen, key=lambda ranked: ranked[1])


class _ColumnWorkers:
    """The workers of the columns of a load path, found once for all tensors at which the same ones are alike."""

    def __init__(self, drawn: Sequence[MapColumn]) -> None:
        self._columns = {name: index for index, column in enumerate(drawn) for name in column.workers}
        self.by_column = functools.cache(self._by_column)
        self._classes: tuple[object, Mapping[str, int]] = (), {}

    def _by_column(self, workers: Workers) -> dict[int, Workers]:
        """Return the workers of a row that are in columns, by the index of the column."""
        names_by_column = group_by_key((self._columns[name], name) for name in workers if name in self._columns)
        return {index: tuple(names) for index, names in names_by_column.items()}

    def classes(self, classes: tuple[Workers, ...]) -> Mapping[str, int]:
        """Return the number of each worker's class; it is kept, as most tensors of a stage have the same classes."""
        if self._classes[0] is not classes:
            self._classes = classes, {name: number for number, names in enumerate(classes) for name in names}
        return self._classes[1]


def _entry(
    tensor: TensorComparison, drawn: Sequence[MapColumn], workers: _ColumnWorkers, strings: Strings
) -> tuple[list[Any], int]:
    """Return a tensor as it is written, and its rank; its cells are empty until the caller fills them in."""
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    entry: list[Any] = [strings.place(text) for text in (tensor.layer, tensor.tensor, shape, tensor.dtype, tensor.rule)]
    rank = _UNLIKE if len(tensor.classes) > 1 else _ALIKE
    is_complete = len(tensor.workers) >= sum(column.stands_for for column in drawn)
    if tensor.is_equal and is_complete:
        return entry, rank
    statuses = {row.status for row in tensor.outcomes}
    if statuses & BAD:
        rank = _BAD
    elif statuses & {"skipped", "blocked"}:
        rank = _UNCHECKED
    variants, shows = _variants(tensor, len(drawn), workers, strings)
    entry += [[], variants]
    if shows not in ([0] * len(drawn), list(range(len(drawn)))):
        entry.append(shows)
    return entry, rank


def _variants(
    tensor: TensorComparison, column_count: int, workers: _ColumnWorkers, strings: Strings
) -> tuple[list[list[Any]], list[int]]:
    """Return the distinct variants of a tensor, and the index of each column's one; -1 where a column has none."""
    rows_by_column: list[list[tuple[Outcome, Workers]]] = [[] for _ in range(column_count)]
    for row in tensor.outcomes:
        for index, names in workers.by_column(row.workers).items():
            rows_by_column[index].append((row, names))
    classes = workers.classes(tensor.classes)
    variants: dict[tuple[Any, ...], int] = {}
    shows = []
    for rows in rows_by_column:
        if rows:
            shows.append(variants.setdefault(_variant(rows, classes, strings), len(variants)))
        else:
            shows.append(-1)
    return [list(variant) for variant in variants], shows


def _variant(rows: Sequence[tuple[Outcome, Workers]], classes: Mapping[str, int], strings: Strings) -> tuple[Any, ...]:
    """Return the variant of a column: its worker's row, or the worst of its workers' rows."""
    row = worst_of(row for row, _ in rows)
    column_classes = {classes.get(name, 0) for _, names in rows for name in names}
    diagnosis = row.reason if row.status in ("skipped", "blocked") else row.word
    diagnosis_place = -1
    if diagnosis is not None and row.status != "equal":
        diagnosis_place = strings.place(diagnosis)
    measured = row.mismatched if row.status not in ("equal", "missing") else None
    is_measured = measured is not None
    workers_off = None
    is_of_several = len(rows) > 1 or len(rows[0][1]) > 1
    if is_of_several:
        workers_off = sum(len(names) for outcome, names in rows if outcome.status in BAD) or None
    written: list[Any] = [
        _STATUS[row.status],
        column_classes.pop() if len(column_classes) == 1 else MIXED,
        diagnosis_place,
        digits(row.share),
        digits(row.max_abs) if is_measured else None,
        row.max_ulp if is_measured else None,
        measured,
        workers_off,
    ]
    while len(written) > 1 and written[-1] in (None, -1):
        written.pop()
    if len(written) == 2 and written[1] == 0:
        written.pop()
    return tuple(written)
