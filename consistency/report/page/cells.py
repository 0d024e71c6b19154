"""The data of the page's table: what each architecture and worker saw of each tensor, small enough to lie in a page.

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
from consistency.comparison.outcomes import Workers, gathered, names_in, worst_of
from consistency.comparison.result import BAD, Comparison, Outcome, TensorComparison
from consistency.numerics.rules import Rule
from consistency.report.layers import cell_figures, devices_text
from consistency.report.marks import key
from consistency.report.summary import MOST_COLUMNS, Row
from consistency.text import one_line

KEY = key()
"""Status, its mark, and what it means; a status is written as its place in here."""


def digits(value: float | None) -> float | str | None:
    """Return a number to three digits, NaN and infinities as words: JSON has none."""
    return None if value is None else json_number(float(f"{value:.3g}"))


MOST_VARIANTS = 132_000
"""2000 tensors on 64 devices of which no two agree, and on two architectures: at some 36 bytes each below 5 MB."""

MOST_TENSORS = 20_000
"""At some 25 bytes and the name of a layer each below 2 MB."""

MIXED = -1
"""Class of a column whose workers are of several."""

AGREE = -1
"""Agreement of a cell whose devices, at least two, are bitwise equal."""

_STATUS = {status: place for place, (status, _, _) in enumerate(KEY)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MapColumn:
    """One worker, or many that are shown as one: the rows of `workers` are read, for `stands_for` workers in all."""

    label: str
    architecture: str
    workers: tuple[str, ...]
    stands_for: int


class Section(msgspec.Struct, kw_only=True):
    """One stage on one load path; `rows` are tensors as above, `left_out` those for which there was no room."""

    load_path: str
    stage: str
    total: int = 0
    # bad, unchecked, unlike: tensors with a mismatch; others that some worker did not check; others that are not
    # bitwise equal everywhere
    bad: int = 0
    unchecked: int = 0
    unlike: int = 0
    checks: bool = True  # whether all of them are facts with a limit, and no tensors
    left_out: int = 0
    rows: list[list[Any]] = []


class Strings:
    """Each text once, and its place."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        found = self._places.get(text)
        if found is None:
            found = self._places[text] = len(self.all)
            self.all.append(one_line(text))
        return found


def columns(comparison: Comparison, load_path: str, rows: Sequence[Row]) -> list[MapColumn]:
    """Return the columns below the architectures of a load path: its workers, or, of many, the rows of the table."""
    here = {worker.name: worker for worker in comparison.workers if worker.load_path == load_path}
    if len(here) <= MOST_COLUMNS:
        seen = names_in(tensor.workers for tensor in comparison.tensors if tensor.load_path == load_path)
        # a reference file has no rows, and a reference worker may have them on a load path that it did not take
        names = [name for name, worker in here.items() if name in seen or worker.status != "ok"]
        names += [name for name in seen if name not in here]
        of = ByArchitecture(comparison).of
        return [
            MapColumn(label=name, architecture=of.get(name, ""), workers=(name,), stands_for=1)
            for name in sorted(names, key=lambda name: _place(comparison, of.get(name, "")))
        ]
    drawn = []
    for row in rows:
        label = some(row.names, 2) if row.kinds == 1 else f"{len(row.names)} others"
        read = row.names[:1] if row.kinds == 1 else row.names
        column = MapColumn(label=label, architecture=row.architecture, workers=read, stands_for=len(row.names))
        drawn.append(column)
    return drawn


def _place(comparison: Comparison, architecture: str) -> int:
    names = [group.name for group in comparison.architectures]
    return names.index(architecture) if architecture in names else len(names)


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
    """Return what is drawn of every stage on every load path, in the order of `Stage`; `layers` are of `unequal`."""
    found: dict[tuple[str, str], Section] = {}
    members = ByArchitecture(comparison)
    seen = iter(layers)
    titles = {load_path: list(architectures(drawn)) for load_path, drawn in by_load_path.items()}
    entries: list[_Entry] = []
    shown = {load_path: _Shown(drawn) for load_path, drawn in by_load_path.items()}
    for number, tensor in enumerate(comparison.tensors):
        key = (tensor.load_path, tensor.stage)
        section = found.get(key)
        if section is None:
            section = found[key] = Section(load_path=one_line(key[0]), stage=one_line(key[1]))
        section.total += 1
        entry, rank = _entry(tensor, by_load_path[tensor.load_path], shown[tensor.load_path], strings)
        by_architecture = None if tensor.is_equal or not tensor.outcomes else next(seen).architectures
        if len(entry) > _CELLS:
            by_architecture = by_architecture or cells_of(tensor, members)
            entry[_CELLS] = [_cell(by_architecture.get(name), strings) for name in titles[tensor.load_path]]
        section.bad += rank == _BAD
        section.unchecked += rank == _UNCHECKED
        section.unlike += rank == _UNLIKE
        section.checks &= tensor.rule == Rule.LIMIT
        entries.append((rank, number, section, entry))
    for _, _, section, entry in _shortened(entries):
        section.rows.append(entry)
    for section in found.values():
        section.left_out = section.total - len(section.rows)
    ordered = sorted(found, key=lambda key: (comparison.load_paths.index(key[0]), stage_order(key[1])))
    return [found[key] for key in ordered]


def architectures(drawn: Sequence[MapColumn]) -> dict[str, tuple[str, ...]]:
    """Return the architectures of a load path, each with its columns' labels."""
    found = gathered((column.architecture, column.label) for column in drawn)
    return {name: tuple(labels) for name, labels in found.items()}


_BAD, _UNCHECKED, _UNLIKE, _ALIKE = range(4)
_CELLS, _VARIANTS = 5, 6  # places in an entry


def _cost(entry: Sequence[Any]) -> int:
    return len(entry[_CELLS]) + len(entry[_VARIANTS]) if len(entry) > _CELLS else 0


def _cell(cell: LayerCell | None, strings: Strings) -> list[Any] | None:
    """Return an architecture's cell as it is written."""
    if cell is None:
        return None
    found: list[Any] = [_STATUS[cell.status], digits(cell.share)]
    figures = cell_figures(cell)
    found.append(figures if len(figures) > 1 else None)  # a mark alone follows from the status
    if len(cell.classes) > 1:
        found.append(strings.place(devices_text(cell)))
    elif len(cell.workers) > 1 and cell.classes:
        found.append(AGREE)
    while found[-1] is None:
        found.pop()
    return found


_Entry = tuple[int, int, Section, list[Any]]
"""How much a tensor matters, its place among all, its section, and the tensor as it is written."""


def _shortened(entries: list[_Entry]) -> list[_Entry]:
    """Return the entries for which there is room: mismatches before differing tensors before equal ones, in order."""
    cost = sum(_cost(entry) for *_, entry in entries)
    if len(entries) <= MOST_TENSORS and cost <= MOST_VARIANTS:
        return entries
    room = MOST_VARIANTS
    chosen: list[_Entry] = []
    for one in sorted(entries, key=lambda one: one[:2]):
        needs = _cost(one[3])
        if len(chosen) < MOST_TENSORS and needs <= room:
            room -= needs
            chosen.append(one)
    return sorted(chosen, key=lambda one: one[1])


class _Shown:
    """The workers of the columns of a load path, found once for all tensors at which the same ones are alike."""

    def __init__(self, drawn: Sequence[MapColumn]) -> None:
        self._places = {name: place for place, column in enumerate(drawn) for name in column.workers}
        self.by_column = functools.cache(self._by_column)
        self._classes: tuple[object, Mapping[str, int]] = (), {}

    def _by_column(self, workers: Workers) -> dict[int, Workers]:
        """Return those of these workers that are in columns, by the places of the columns."""
        found = gathered((self._places[name], name) for name in workers if name in self._places)
        return {place: tuple(names) for place, names in found.items()}

    def classes(self, classes: tuple[Workers, ...]) -> Mapping[str, int]:
        """Return the number of each worker's class; of the tensors of a stage most have the same classes."""
        if self._classes[0] is not classes:
            self._classes = classes, {name: number for number, names in enumerate(classes) for name in names}
        return self._classes[1]


def _entry(
    tensor: TensorComparison, drawn: Sequence[MapColumn], columns: _Shown, strings: Strings
) -> tuple[list[Any], int]:
    """Return a tensor as it is written, and how much it matters."""
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    entry: list[Any] = [strings.place(text) for text in (tensor.layer, tensor.tensor, shape, tensor.dtype, tensor.rule)]
    rank = _UNLIKE if len(tensor.classes) > 1 else _ALIKE
    if tensor.is_equal and len(tensor.workers) >= sum(column.stands_for for column in drawn):
        return entry, rank
    classes = columns.classes(tensor.classes)
    statuses = {row.status for row in tensor.outcomes}
    if statuses & BAD:
        rank = _BAD
    elif statuses & {"skipped", "blocked"}:
        rank = _UNCHECKED
    seen: list[list[tuple[Outcome, Workers]]] = [[] for _ in drawn]
    for row in tensor.outcomes:
        for place, names in columns.by_column(row.workers).items():
            seen[place].append((row, names))
    variants: dict[tuple[Any, ...], int] = {}
    shows = []
    for found in seen:
        variant = _variant(found, classes, strings) if found else None
        shows.append(-1 if variant is None else variants.setdefault(variant, len(variants)))
    entry += [[], [list(variant) for variant in variants]]
    if shows not in ([0] * len(drawn), list(range(len(drawn)))):
        entry.append(shows)
    return entry, rank


def _variant(rows: Sequence[tuple[Outcome, Workers]], classes: Mapping[str, int], strings: Strings) -> tuple[Any, ...]:
    """Return what a column shows: its worker's row, or the worst of its workers' rows."""
    row = worst_of(row for row, _ in rows)
    of = {classes.get(name, 0) for _, names in rows for name in names}
    word = row.reason if row.status in ("skipped", "blocked") else row.word
    measured = row.mismatched if row.status not in ("equal", "missing") else None
    found: list[Any] = [
        _STATUS[row.status],
        of.pop() if len(of) == 1 else MIXED,
        -1 if word is None or row.status == "equal" else strings.place(word),
        digits(row.share),
        digits(row.max_abs) if measured is not None else None,
        row.max_ulp if measured is not None else None,
        measured,
        (sum(len(names) for one, names in rows if one.status in BAD) or None)
        if len(rows) > 1 or len(rows[0][1]) > 1
        else None,
    ]
    while len(found) > 1 and found[-1] in (None, -1):
        found.pop()
    if len(found) == 2 and found[1] == 0:
        found.pop()
    return tuple(found)
