"""The records of a worker by tensor: a table per stage, which workers that wrote the same bytes share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, overload

from consistency.capture.records import TensorRecord

Key = tuple[str, str, str]
"""Stage, layer and tensor."""

T = TypeVar("T")

_Part = tuple[TensorRecord, ...]
"""Some records of a worker in order, all of one stage; workers that wrote the same bytes share the object."""


class StageTable(dict[Key, TensorRecord]):
    """The records of a stage: one object for all workers that wrote the same.

    It is hashed and compared by its identity, not by its content, so this takes no time for a large table.
    """

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


NOTHING = StageTable()
"""The table of a stage without records; one object, so that workers without any are alike."""


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
    return list(dict.fromkeys(itertools.chain.from_iterable(of_worker.stages.values() for of_worker in records)))


class RecordTables:
    """Makes the `Records` of many workers, and each table of a stage once for all that share its parts."""

    def __init__(self) -> None:
        self._keys: dict[Key, Key] = {}  # one tuple per tensor for all workers
        # by the identity of a part, which is kept here so that no other object gets the same one
        self._parts: dict[int, tuple[_Part, dict[str, dict[str, StageTable]]]] = {}
        self._joined: dict[tuple[StageTable, ...], StageTable] = {}

    def of(self, parts: Iterable[_Part]) -> dict[str, Records]:
        """Return the records of a worker by load path; the load path that it was started for is an empty name."""
        tables_by_path: dict[str, dict[str, list[StageTable]]] = {"": {}}
        for part in parts:
            for load_path, stages in self._tables(part).items():
                tables_by_stage = tables_by_path.setdefault(load_path, {})
                for stage, table in stages.items():
                    tables_by_stage.setdefault(stage, []).append(table)
        return {
            load_path: Records({stage: self._join(tables) for stage, tables in tables_by_stage.items()})
            for load_path, tables_by_stage in tables_by_path.items()
        }

    def _tables(self, part: _Part) -> dict[str, dict[str, StageTable]]:
        """Return the tables of one part by load path and stage, made once however many workers have the part."""
        cached = self._parts.get(id(part))
        if cached is not None:
            return cached[1]
        tables: dict[str, dict[str, StageTable]] = {}
        for record in part:
            key = self._keys.setdefault(record.key, record.key)
            tables_by_stage = tables.setdefault(record.load_path, {})
            tables_by_stage.setdefault(record.stage, StageTable())[key] = record
        self._parts[id(part)] = part, tables
        return tables

    def _join(self, tables: list[StageTable]) -> StageTable:
        """Return the table of a stage that was recorded in several parts."""
        if len(tables) == 1:
            return tables[0]
        same_tables = tuple(tables)
        if same_tables not in self._joined:
            items = itertools.chain.from_iterable(table.items() for table in tables)
            self._joined[same_tables] = StageTable(items)
        return self._joined[same_tables]
