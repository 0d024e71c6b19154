"""A comparison of many workers -> `report.json` of schema `consistency.report/2`, whose size the fleet does not decide.

Workers that saw the same of a tensor have one row, tensors that are equal everywhere one entry, and names of workers
stand once, in `groups`. What grows is what identifies each worker: some eighty bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.version import __version__
from consistency.comparison.layers import LayerCell, LayerComparison, Members, layers_of
from consistency.comparison.result import Comparison, Row, TensorComparison
from consistency.comparison.rows import OncePerSet, Workers
from consistency.report.fleet.entries import gathered
from consistency.report.fleet.ranges import folded
from consistency.report.fleet.types import (
    SCHEMA,
    CellOfGroup,
    LayerOfGroups,
    RowOfGroup,
    TensorOfGroups,
)
from consistency.report.folding import fold, fold_layers
from consistency.report.summary import badness

MOST_ROWS = 16
"""Rows of a tensor: eight architectures, each with devices that pass and devices that do not. Of more, those that
differ in figures alone are joined."""

MOST_CLASSES = 16
"""Classes of a tensor, the reference worker's and then the largest."""

MOST_IN_FULL = 64
"""Workers, and hosts, of which all is written: as many as the page shows."""

_KINDS = ("architecture", "model", "load_path", "status", "driver", "capability")


class _Groups:
    """The sets of workers of a report, each with its number."""

    def __init__(self, everybody: Workers) -> None:
        self._numbers: dict[Workers, int] = {}
        self.number = OncePerSet(lambda workers: self._numbers.setdefault(workers, len(self._numbers)))
        self.number(everybody)

    def entries(self) -> Iterator[dict[str, Any]]:
        for workers in self._numbers:
            yield {"workers": folded(workers), "count": len(workers)}


def render(comparison: Comparison, first: Sequence[str]) -> Iterator[bytes]:
    """Yield the file, one line per entry; the fields `first` stand before the others."""
    groups = _Groups(tuple(dict.fromkeys(worker.name for worker in comparison.workers)))
    writer = _Writer(comparison, groups)
    table: dict[str, Any] = {name: getattr(comparison, name) for name in comparison.__struct_fields__}
    lists: dict[str, Iterable[object]] = {
        "workers": writer.workers(),
        "architectures": (
            {"name": one.name, "workers": groups.number(one.workers)} for one in comparison.architectures
        ),
        "tensors": map(writer.tensor, fold(comparison.tensors)),
        "findings": map(writer.finding, comparison.findings),
        "first_divergence": writer.by_group(comparison.first_divergence),
        "first_bitwise_difference": writer.by_group(comparison.first_bitwise_difference),
        "merging": writer.by_group(comparison.merging),
        "sources": writer.sources(),
        "layers": map(writer.layer, fold_layers(layers_of(comparison))),
    }
    lines = {name: [encode_json(one) for one in entries] for name, entries in lists.items()}
    lines["groups"] = [encode_json(one) for one in groups.entries()]  # which the others have numbered
    table |= {"captures": folded(comparison.captures), **writer.hosts()}
    opening = b"{\n"
    named = {"schema": SCHEMA, "tool": __version__, **{name: table[name] for name in first}, "groups": None, **table}
    for name, value in {**named, "layers": None}.items():
        text = _listed(lines[name]) if name in lines else encode_json(value)
        yield opening + encode_json(name) + b": " + text
        opening = b",\n"
    yield b"\n}\n"


def _listed(lines: Sequence[bytes]) -> bytes:
    return b"[\n" + b",\n".join(lines) + b"\n]" if lines else b"[]"


class _Writer:
    def __init__(self, comparison: Comparison, groups: _Groups) -> None:
        self._comparison, self._groups = comparison, groups
        self._members = Members(comparison)
        self._is_large = len(comparison.workers) > MOST_IN_FULL

    def tensor(self, found: tuple[TensorComparison, Sequence[str]]) -> object:
        """Return the entry of a tensor, or of several that are equal everywhere, with their layers."""
        tensor, layers = found
        classes, left_out = self._classes(tensor.classes)
        return TensorOfGroups(
            **{**_fields(tensor), "classes": classes, "rows": tuple(self._rows(tensor)), **_several(layers)},
            classes_left_out=left_out,
        )  # fmt: skip

    def layer(self, found: tuple[LayerComparison, Sequence[str]]) -> object:
        """Return the entry of a tensor by architecture, or of several that are alike, with their layers."""
        layer, layers = found
        cells = {name: self._cell(cell) for name, cell in layer.architectures.items()}
        return LayerOfGroups(**{**_fields(layer), "architectures": cells}, **_several(layers))

    def finding(self, finding: msgspec.Struct) -> dict[str, Any]:
        """Return the entry of a finding, all its fields as in schema 1 but for the workers."""
        fields = _fields(finding)
        return {**fields, "workers": self._groups.number(fields["workers"])}

    def by_group(self, found: Iterable[msgspec.Struct]) -> Iterator[dict[str, Any]]:
        """Yield an entry for all workers of which the same is said."""
        same: dict[bytes, tuple[dict[str, Any], list[str]]] = {}
        for one in found:
            fields = _fields(one)
            worker = fields.pop("worker")
            same.setdefault(encode_json(fields), (fields, []))[1].append(worker)
        for shared, workers in same.values():
            yield {"workers": self._groups.number(tuple(workers)), **shared}

    def workers(self) -> Iterator[dict[str, Any]]:
        """Yield an entry per kind of worker, and of a fleet one for each that stands for others or stands out."""
        workers = self._comparison.workers
        alone = self._in_full() if self._is_large else []
        things = []
        for place, worker in enumerate(workers):
            fields = {name: value for name, value in _fields(worker).items() if name != "name"}
            if self._is_large and place not in alone:
                fields["stage_memory"] = ()
            things.append(decode_json(encode_json(fields), dict))
        for places, entry in gathered(things, alone=alone, kinds=_KINDS):
            yield {"workers": self._groups.number(tuple(workers[place].name for place in places)), **entry}

    def _in_full(self) -> list[int]:
        """Return the places of workers of which all is written: the reference, those with errors, one per model."""
        comparison = self._comparison
        named = {name for finding in comparison.findings if finding.severity == "error" for name in finding.workers}
        kinds: set[tuple[str, ...]] = set()

        def weight(place: int) -> int:
            worker = comparison.workers[place]
            kind = (worker.architecture, worker.model, worker.load_path)
            is_first = kind not in kinds
            kinds.add(kind)
            return 0 if worker.status != "ok" else 1 if worker.name == comparison.reference or is_first else 2

        places = [(weight(place), place) for place in range(len(comparison.workers))]
        chosen = [one for one in places if one[0] < 2 or comparison.workers[one[1]].name in named]
        return sorted(place for _, place in sorted(chosen)[:MOST_IN_FULL])

    def sources(self) -> Iterator[dict[str, Any]]:
        sources = self._comparison.sources
        things = [{name: value for name, value in _fields(one).items() if name != "name"} for one in sources]
        for places, entry in gathered(things):
            yield {"names": folded(sources[place].name for place in places), **entry}

    def hosts(self) -> dict[str, Any]:
        """Return the hosts of few, and of many those with a problem of their own."""
        hosts = self._comparison.hosts
        if len(hosts) > MOST_IN_FULL:
            hosts = tuple(one for one in hosts if one.new_log or any(gpu.after for gpu in one.gpus))[:MOST_IN_FULL]
        return {"hosts": hosts, "hosts_left_out": len(self._comparison.hosts) - len(hosts)}

    def _cell(self, cell: LayerCell) -> object:
        classes, left_out = self._classes(cell.classes)
        workers = self._groups.number(cell.workers)
        return CellOfGroup(**{**_fields(cell), "workers": workers, "classes": classes}, classes_left_out=left_out)

    def _classes(self, classes: tuple[Workers, ...]) -> tuple[tuple[int, ...], int]:
        """Return the groups of the first class and of the largest others, and how many are left out."""
        ranked = [*classes[:1], *sorted(classes[1:], key=len, reverse=True)] if len(classes) > MOST_CLASSES else classes
        numbers = tuple(map(self._groups.number, ranked[:MOST_CLASSES]))
        return numbers, len(classes) - len(numbers)

    def _rows(self, tensor: TensorComparison) -> Iterator[object]:
        groups = list(tensor.groups)
        if len(groups) <= MOST_ROWS:
            for row, workers in groups:
                yield self._row(row, workers)
            return
        alike: dict[object, list[tuple[Row, Workers]]] = {}
        for row, workers in groups:
            architectures = tuple(self._members.split(workers))
            alike.setdefault((row.status, row.reference, row.word, row.reason, architectures), []).append(
                (row, workers)
            )
        for found in alike.values():
            worst = max(found, key=lambda one: badness(one[0]))
            yield self._row(*worst)
            others = [(row, workers) for row, workers in found if row is not worst[0]]
            if others:
                row = worst[0]
                without = Row(
                    worker=others[0][0].worker, reference=row.reference, status=row.status, elements=row.elements,
                    word=row.word, reason=row.reason,
                )  # fmt: skip
                names = tuple(name for _, workers in others for name in workers)
                yield self._row(without, names, left_out=len(others))

    def _row(self, row: Row, workers: Workers, *, left_out: int = 0) -> object:
        fields = {name: value for name, value in _fields(row).items() if name != "worker"}
        return RowOfGroup(**fields, workers=self._groups.number(workers), left_out=left_out)


def _fields(one: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def _several(layers: Sequence[str]) -> Mapping[str, Any]:
    return {"count": len(layers), "layers": tuple(layers)} if len(layers) > 1 else {"count": 1, "layers": ()}
