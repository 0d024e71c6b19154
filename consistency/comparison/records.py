"""The records of a worker by tensor: a table per stage, which workers that wrote the same bytes share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, overload

from consistency.capture.records import TensorRecord

Key = tuple[str, str, str]
"""Stage, layer and tensor."""

T = TypeVar("T")

_Part = tuple[TensorRecord, ...]


class StageTable(dict[Key, TensorRecord]):
    """The records of a stage: one object for all workers that wrote the same, and known as that, not by its content."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


NOTHING = StageTable()
"""The records of a stage that a worker has none of; one object, so that workers without any are alike."""


class Records(Mapping[Key, TensorRecord]):
    """The records of a worker on a load path, stage by stage, each in the model's order.

    Of a fleet the tables of most stages are equal in most workers. Whoever goes through the records of many workers
    goes through `stages` instead, and through each table once.
    """

    __slots__ = ("stages",)

    def __init__(self, stages: Mapping[str, StageTable]) -> None:
        self.stages = stages

    @classmethod
    def of(cls, records: Iterable[TensorRecord]) -> Records:
        """Return records that no other worker shares."""
        stages: dict[str, StageTable] = {}
        for record in records:
            stages.setdefault(record.stage, StageTable())[record.key] = record
        return cls(stages)

    def stage(self, name: str) -> StageTable:
        """Return the records of a stage."""
        return self.stages.get(name, NOTHING)

    def __getitem__(self, key: Key) -> TensorRecord:
        return self.stages[key[0]][key]

    @overload
    def get(self, key: Key, default: None = None, /) -> TensorRecord | None: ...
    @overload
    def get(self, key: Key, default: T, /) -> TensorRecord | T: ...
    def get(self, key: Key, default: Any = None, /) -> Any:
        return self.stages.get(key[0], NOTHING).get(key, default)

    def __iter__(self) -> Iterator[Key]:
        for table in self.stages.values():
            yield from table

    def __len__(self) -> int:
        return sum(map(len, self.stages.values()))


def tables_of(records: Iterable[Records]) -> list[StageTable]:
    """Return the different tables of many workers, in the order of the first worker of each."""
    return list(dict.fromkeys(table for one in records for table in one.stages.values()))


class RecordTables:
    """Makes the `Records` of many workers, and each table of a stage once for all that share its parts."""

    def __init__(self) -> None:
        self._keys: dict[Key, Key] = {}  # one tuple per tensor for all workers
        self._parts: dict[int, tuple[_Part, dict[str, dict[str, StageTable]]]] = {}  # with the part, which keeps its id
        self._joined: dict[tuple[StageTable, ...], StageTable] = {}

    def of(self, parts: Iterable[_Part]) -> dict[str, Records]:
        """Return the records of a worker by load path; its own is empty."""
        found: dict[str, dict[str, list[StageTable]]] = {"": {}}
        for part in parts:
            for load_path, stages in self._tables(part).items():
                of_path = found.setdefault(load_path, {})
                for stage, table in stages.items():
                    of_path.setdefault(stage, []).append(table)
        return {
            load_path: Records({stage: self._join(tables) for stage, tables in stages.items()})
            for load_path, stages in found.items()
        }

    def _tables(self, part: _Part) -> dict[str, dict[str, StageTable]]:
        known = self._parts.get(id(part))
        if known is not None:
            return known[1]
        found: dict[str, dict[str, StageTable]] = {}
        for record in part:
            stages = found.setdefault(record.load_path, {})
            stages.setdefault(record.stage, StageTable())[self._keys.setdefault(record.key, record.key)] = record
        self._parts[id(part)] = part, found
        return found

    def _join(self, tables: list[StageTable]) -> StageTable:
        """Return the table of a stage that was recorded in several parts."""
        if len(tables) == 1:
            return tables[0]
        name = tuple(tables)
        if name not in self._joined:
            self._joined[name] = StageTable((key, record) for table in tables for key, record in table.items())
        return self._joined[name]
