"""Judge one worker per group with identical records of a stage, and share the sets of workers among tensors.

A fleet has thousands of workers, and of each stage a few different tables of records. What is done per tensor is done
per table; the names of the workers are put together once for all tensors at which the same ones are alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from consistency.capture.names import WHOLE_MODEL
from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.case.stage import Stage
from consistency.case.stages import SPECS, stages_of
from consistency.comparison.judge import PAYLOAD, is_as_sent, judge
from consistency.comparison.outcomes import Outcome, Workers
from consistency.comparison.records import Key, StageTable
from consistency.comparison.workers import ComparedWorker

_OF_A_GROUP = frozenset(stages_of(lambda spec: spec.together))


@dataclass(slots=True, kw_only=True)
class _Alike:
    """Workers with one table of records of a stage, of which any may be judged for all."""

    first: ComparedWorker
    table: StageTable
    kind: int  # equal for workers of which one may be judged for all where they share a record
    expected: bool  # whether these workers should have a record of a tensor that others have
    places: list[int] = field(default_factory=list)  # places of the workers on the load path


class Members:
    """The workers of a load path, their reference, and sets of them.

    Parameters
    ----------
    workers : sequence of ComparedWorker
    reference : ComparedWorker
        One of them.
    """

    def __init__(self, workers: Sequence[ComparedWorker], reference: ComparedWorker) -> None:
        self.workers, self.reference = workers, reference
        self.labels = [worker.label for worker in workers]
        self._reference_place = next(place for place, worker in enumerate(workers) if worker is reference)
        numbers: dict[object, int] = {}
        self._kinds = [numbers.setdefault(worker.kind(), len(numbers)) for worker in workers]
        self._failures = [worker.failures for worker in workers]
        self._same: dict[Workers, Workers] = {}
        self._same_classes: dict[tuple[Workers, ...], tuple[Workers, ...]] = {}

    def stage(self, name: str) -> StageMembers:
        """Return the workers as they are alike in a stage."""
        return StageMembers(self, name)

    def alike(self, stage: str) -> list[_Alike]:
        """Return the different tables of a stage, in the order of their first workers."""
        found: dict[object, _Alike] = {}
        for place, (worker, kind, failures) in enumerate(zip(self.workers, self._kinds, self._failures, strict=True)):
            table = worker.records.stage(stage)
            expected = _is_expected(worker, self.reference, stage)
            # what `judge` says of a worker without a record follows from the last three
            name = (table, kind, expected, worker.info.status, worker.info.reason, failures.get(stage))
            if name not in found:
                found[name] = _Alike(first=worker, table=table, kind=kind, expected=expected)
            found[name].places.append(place)
        return list(found.values())

    def names(self, places: Iterable[int], *, reference_first: bool = False) -> Workers:
        """Return the names of workers: the same object for the same ones."""
        ordered = sorted(places)
        if reference_first and self._reference_place in ordered:
            ordered.remove(self._reference_place)
            ordered.insert(0, self._reference_place)
        labels = tuple(self.labels[place] for place in ordered)
        return self._same.setdefault(labels, labels)

    def classes(self, found: tuple[Workers, ...]) -> tuple[Workers, ...]:
        """Return classes of agreement: the same object for the same ones."""
        return self._same_classes.setdefault(found, found)


class StageMembers:
    """The workers of a load path as they are alike in a stage."""

    def __init__(self, members: Members, stage: str) -> None:
        self._members, self._alike = members, members.alike(stage)
        self._workers: dict[tuple[tuple[int, ...], bool], Workers] = {}

    def first_record(self, key: Key) -> TensorRecord:
        """Return the reference worker's record of a tensor, else that of the first worker that has one."""
        own = self._members.reference.records.get(key)
        return own or next(alike.table[key] for alike in self._alike if key in alike.table)

    def outcomes(self, key: Key, *, expected: bool) -> tuple[tuple[Outcome, ...], Workers]:
        """Judge what all workers recorded of a tensor; return the outcomes, and the workers of all of them.

        A record is `expected` of every worker, unless it is a fact: the other workers have other devices.
        """
        reference = self._members.reference
        same: dict[object, list[int]] = {}
        for number, alike in enumerate(self._alike):
            record = alike.table.get(key)
            if record is not None:
                same.setdefault((id(record), alike.kind), []).append(number)
            elif expected and alike.expected and key[1] != WHOLE_MODEL:
                same[number] = [number]
        found = _Found()
        for numbers in same.values():
            row = judge(self._alike[numbers[0]].first, reference, key)
            if not row.unread:
                found.add(row, self._alike[numbers[0]].places[0], numbers)
                continue
            # another capture may still have the stored tensor that this one has lost
            for place in (place for number in numbers for place in self._alike[number].places):
                found.add(judge(self._members.workers[place], reference, key), place)
        groups = sorted(found.groups, key=lambda group: group.first)
        every = [number for group in groups for number in group.tables]
        places = [place for group in groups for place in group.places]
        return (
            tuple(group.row.of(self.workers(tuple(sorted(group.tables)), group.places)) for group in groups),
            self.workers(tuple(sorted(every)), places),
        )

    def classes(self, key: Key) -> tuple[Workers, ...]:
        """Group the workers that recorded a tensor by its digest, the reference worker's class first."""
        classes: dict[str | None, list[int]] = {}
        own = self._members.reference.records.get(key)
        if own is not None and own.digest is not None:
            classes[_bits(own)] = []
        for number, alike in enumerate(self._alike):
            record = alike.table.get(key)
            if record is not None and record.digest is not None:
                classes.setdefault(_bits(record), []).append(number)
        names = (self.workers(tuple(numbers), reference_first=True) for numbers in classes.values())
        return self._members.classes(tuple(names))

    def workers(
        self, numbers: tuple[int, ...], places: Sequence[int] = (), *, reference_first: bool = False
    ) -> Workers:
        """Return the names of all workers of these tables, and of those at `places`."""
        name = (numbers, reference_first)
        if not places and name in self._workers:
            return self._workers[name]
        every = [*places, *(place for number in numbers for place in self._alike[number].places)]
        found = self._members.names(every, reference_first=reference_first)
        if not places:
            self._workers[name] = found
        return found


@dataclass(slots=True)
class _Group:
    """A row, the first worker's place, and the tables, and the single workers, for which it holds too."""

    row: Outcome
    first: int
    tables: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Found:
    """The rows of a tensor; those that differ in the worker alone become one."""

    groups: list[_Group] = field(default_factory=list)
    _alike: dict[tuple[object, ...], list[_Group]] = field(default_factory=dict)

    def add(self, row: Outcome, place: int, tables: Sequence[int] = ()) -> None:
        """Take the row of these tables, or of the worker at `place` alone."""
        mark = (row.status, row.reference, row.word, row.mismatched, row.max_abs, row.ratio)
        candidates = self._alike.setdefault(mark, [])
        group = next((one for one in candidates if one.row == row.of(one.row.workers)), None)
        if group is None:
            group = _Group(row, place)
            candidates.append(group)
            self.groups.append(group)
        group.first = min(group.first, place)
        if tables:
            group.tables += tables
        else:
            group.places.append(place)


def _is_expected(worker: ComparedWorker, reference: ComparedWorker, stage: str) -> bool:
    """Return whether a worker should have the tensors of a stage: its case has the stage, at the same level."""
    if SPECS[Stage(stage)].other_rows:
        return False
    if stage in _OF_A_GROUP and worker.capture is not reference.capture:  # another group may have another size
        return False
    if not worker.expects_stage(stage):  # a stage that others skipped as a whole
        return False
    return worker.capture is reference.capture or worker.case.level == reference.case.level


def _bits(record: TensorRecord) -> str | None:
    """Return what makes workers agree: the digest; for copies, that they arrived as sent."""
    return PAYLOAD if record.stage == standard.TRANSFER and is_as_sent(record) else record.digest
