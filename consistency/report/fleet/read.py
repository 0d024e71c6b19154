"""`report.json` of schema `consistency.report/2` -> the comparison that it was written of.

What the file does not have stays out: figures of rows that were joined, the smallest classes, and hosts without a
problem. A file may be a stranger's: every number of a group is checked, and so is how much patterns stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from consistency.capture.json_codec import decode_json, encode_json
from consistency.comparison.merging import Merging
from consistency.comparison.result import (
    ArchitectureGroup,
    Comparison,
    Divergence,
    Finding,
    Row,
    Source,
    TensorComparison,
    WorkerSummary,
)
from consistency.comparison.rows import Rows, Workers
from consistency.report.fleet.entries import spread
from consistency.report.fleet.ranges import folded, unfolded
from consistency.report.fleet.types import ReportOfGroups


def read(content: bytes) -> Comparison:
    """Return the comparison of a file.

    Raises
    ------
    msgspec.ValidationError
        A field has another type, a group does not exist or is not what it says.
    """
    try:
        return _Reader(decode_json(content, ReportOfGroups)).comparison()
    except (ValueError, IndexError, KeyError) as error:
        raise msgspec.ValidationError(str(error)) from error


def with_names(table: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return a decoded file that was changed while every name in it stood alone, outside of patterns."""
    return _patterns(change(named(table)), folded)


def named(table: dict[str, Any]) -> dict[str, Any]:
    """Return a decoded file with every name alone, outside of patterns."""
    return _patterns(table, unfolded)


def _patterns(table: dict[str, Any], convert: Callable[[Iterable[str]], Iterable[str]]) -> dict[str, Any]:
    groups = [{**one, "workers": list(convert(one["workers"]))} for one in table.get("groups") or ()]
    sources = [{**one, "names": list(convert(one["names"]))} for one in table.get("sources") or ()]
    return {**table, "groups": groups, "sources": sources, "captures": list(convert(table.get("captures") or ()))}


class _Reader:
    def __init__(self, report: Any) -> None:
        self._report = report
        self._groups = [self._group(one) for one in report.groups]
        self._places = {name: place for place, name in enumerate(self._groups[0] if self._groups else ())}
        self._orders: dict[tuple[int, ...], Workers] = {}

    def _group(self, group: Any) -> Workers:
        workers = tuple(unfolded(group.workers))
        if len(workers) != group.count:
            raise ValueError(f"a group of {group.count} names {len(workers)} workers")
        return workers

    def _place(self, worker: str) -> int:
        return self._places.get(worker, len(self._places))

    def _named(self, number: int) -> Workers:
        if not 0 <= number < len(self._groups):
            raise ValueError(f"there is no group {number}")
        return self._groups[number]

    def comparison(self) -> Comparison:
        report = self._report
        fields = {name: getattr(report, name) for name in Comparison.__struct_fields__}
        fields["tensors"] = tuple(tensor for one in report.tensors for tensor in self._tensors(one))
        fields["architectures"] = tuple(self._struct(ArchitectureGroup, one) for one in report.architectures)
        fields["findings"] = tuple(self._struct(Finding, one) for one in report.findings)
        for name, kind in (
            ("first_divergence", Divergence),
            ("first_bitwise_difference", Divergence),
            ("merging", Merging),
        ):
            fields[name] = tuple(one for entry in fields[name] for one in self._each(kind, entry))
        fields["workers"] = tuple(self._workers())
        fields["sources"] = tuple(source for one in report.sources for source in _sources(one))
        fields["captures"] = tuple(unfolded(report.captures))
        return Comparison(**fields)

    def _struct(self, kind: type[Any], entry: Any) -> Any:
        fields = {name: getattr(entry, name) for name in kind.__struct_fields__}
        return kind(**{**fields, "workers": self._named(entry.workers)})

    def _each(self, kind: type[Any], entry: Any) -> Iterator[Any]:
        fields = {name: getattr(entry, name) for name in kind.__struct_fields__ if name != "worker"}
        for worker in self._named(entry.workers):
            yield kind(worker=worker, **fields)

    def _tensors(self, entry: Any) -> Iterator[TensorComparison]:
        sets = tuple(self._named(row.workers) for row in entry.rows)
        if not all(sets):
            raise ValueError("a row of no worker")
        rows = tuple(map(_row, entry.rows, sets))
        fields = {name: getattr(entry, name) for name in TensorComparison.__struct_fields__}
        fields["classes"] = tuple(map(self._named, entry.classes))
        fields["rows"] = Rows(rows, sets, self._order([row.workers for row in entry.rows]))
        tensor = TensorComparison(**fields)
        for layer in entry.layers or (entry.layer,):
            yield msgspec.structs.replace(tensor, layer=layer)

    def _order(self, numbers: Sequence[int]) -> Workers:
        name = tuple(numbers)
        if name not in self._orders:
            names = [worker for number in name for worker in self._named(number)]
            if len(set(names)) != len(names):
                raise ValueError("a worker with two rows of one tensor")
            self._orders[name] = tuple(sorted(names, key=self._place))
        return self._orders[name]

    def _workers(self) -> list[WorkerSummary]:
        found = []
        for entry in self._report.workers:
            names = self._named(entry.workers)
            for name, fields in zip(names, spread(_plain(entry, "workers"), len(names)), strict=True):
                found.append(_converted({**fields, "name": name}, WorkerSummary))
        return sorted(found, key=lambda worker: self._place(worker.name))


def _row(entry: Any, workers: Workers) -> Row:
    fields = {name: getattr(entry, name) for name in Row.__struct_fields__ if name != "worker"}
    return Row(worker=workers[0], **fields)


def _sources(entry: Any) -> Iterator[Source]:
    names = list(unfolded(entry.names))
    for name, fields in zip(names, spread(_plain(entry, "names"), len(names)), strict=True):
        yield _converted({**fields, "name": name}, Source)


def _plain(entry: Any, without: str) -> dict[str, Any]:
    table: dict[str, Any] = decode_json(encode_json(entry), dict)
    table.pop(without, None)
    return table


def _converted(fields: dict[str, Any], kind: type[Any]) -> Any:
    names = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    return decode_json(encode_json({names.get(name, name): value for name, value in fields.items()}), kind)
