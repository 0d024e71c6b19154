"""Judge one worker per group with identical records of a stage, and share the sets of workers among tensors.

A fleet has thousands of workers, and of each stage a few different tables of records. Work that is needed per tensor
is done per table, and so per cohort: the workers with one table. The names of the workers are put together once for
all tensors that split the workers alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
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
"""Stages that several processes compute together."""


@dataclass(slots=True, kw_only=True)
class _Cohort:
    """Workers with the same table of records of a stage, so that one is judged for all."""

    first: ComparedWorker
    table: StageTable
    kind: int  # equal for workers of which one may be judged for all where they share a record
    expected: bool  # whether these workers should have a record of a tensor that others have
    positions: list[int] = field(default_factory=list)  # indices of the workers on the load path


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
        self._reference_position = next(i for i, worker in enumerate(workers) if worker is reference)
        # to compare numbers is quicker than to compare kinds, which are long
        numbers: dict[object, int] = {}
        self._kinds = [numbers.setdefault(worker.kind(), len(numbers)) for worker in workers]
        self._failures = [worker.failures for worker in workers]
        # equal sets of workers are one object
        self._label_sets: dict[Workers, Workers] = {}
        self._class_sets: dict[tuple[Workers, ...], tuple[Workers, ...]] = {}

    def stage(self, name: str) -> StageMembers:
        """Return the workers by their records of a stage."""
        return StageMembers(self, name)

    def cohorts(self, stage: str) -> list[_Cohort]:
        """Return the different tables of a stage with their workers, in the order of their first workers."""
        cohorts: dict[object, _Cohort] = {}
        facts_of_workers = zip(self.workers, self._kinds, self._failures, strict=True)
        for position, (worker, kind, failures) in enumerate(facts_of_workers):
            table = worker.records.stage(stage)
            expected = _is_expected(worker, self.reference, stage)
            # how `judge` judges a worker without a record follows from the last three
            key = (table, kind, expected, worker.info.status, worker.info.reason, failures.get(stage))
            if key not in cohorts:
                cohorts[key] = _Cohort(first=worker, table=table, kind=kind, expected=expected)
            cohorts[key].positions.append(position)
        return list(cohorts.values())

    def names(self, positions: Iterable[int], *, reference_first: bool = False) -> Workers:
        """Return the names of workers: the same object for the same ones."""
        ordered = sorted(positions)
        if reference_first and self._reference_position in ordered:
            ordered.remove(self._reference_position)
            ordered.insert(0, self._reference_position)
        labels = tuple(self.labels[position] for position in ordered)
        return self._label_sets.setdefault(labels, labels)

    def classes(self, classes: tuple[Workers, ...]) -> tuple[Workers, ...]:
        """Return classes of agreement: the same object for the same ones."""
        return self._class_sets.setdefault(classes, classes)


class StageMembers:
    """The workers of a load path by their records of a stage."""

    def __init__(self, members: Members, stage: str) -> None:
        self._members, self._cohorts = members, members.cohorts(stage)
        self._workers: dict[tuple[tuple[int, ...], bool], Workers] = {}

    def first_record(self, key: Key) -> TensorRecord:
        """Return the reference worker's record of a tensor, else the record of the first worker that has one."""
        reference_record = self._members.reference.records.get(key)
        return reference_record or next(cohort.table[key] for cohort in self._cohorts if key in cohort.table)

    def outcomes(self, key: Key, *, expected: bool) -> tuple[tuple[Outcome, ...], Workers]:
        """Judge the records that all workers have of a tensor; return the outcomes, and all workers with an outcome.

        A record is `expected` of every worker, unless it is a fact: the other workers have other devices.
        """
        rows = _Rows()
        for numbers in self._cohorts_with_one_row(key, expected=expected):
            first_cohort = self._cohorts[numbers[0]]
            row = judge(first_cohort.first, self._members.reference, key)
            if not row.unread:
                rows.add(row, first_cohort.positions[0], numbers)
                continue
            # another capture may still have the stored tensor that this one has lost
            for position in self._positions(numbers):
                worker = self._members.workers[position]
                rows.add(judge(worker, self._members.reference, key), position)
        groups = sorted(rows.groups, key=lambda group: group.first)
        outcomes = tuple(group.row.of(self.workers(tuple(sorted(group.cohorts)), group.positions)) for group in groups)
        every_cohort = sorted(itertools.chain.from_iterable(group.cohorts for group in groups))
        single_positions = list(itertools.chain.from_iterable(group.positions for group in groups))
        return outcomes, self.workers(tuple(every_cohort), single_positions)

    def _cohorts_with_one_row(self, key: Key, *, expected: bool) -> Iterable[list[int]]:
        """Return the numbers of the cohorts that one row of a tensor is true of, without those that need no row."""
        numbers_by_record: dict[object, list[int]] = {}
        for number, cohort in enumerate(self._cohorts):
            record = cohort.table.get(key)
            if record is not None:
                numbers_by_record.setdefault((id(record), cohort.kind), []).append(number)
            elif expected and cohort.expected and key[1] != WHOLE_MODEL:
                numbers_by_record[number] = [number]
        return numbers_by_record.values()

    def _positions(self, numbers: Iterable[int]) -> Iterator[int]:
        """Yield the positions of all workers of these cohorts."""
        for number in numbers:
            yield from self._cohorts[number].positions

    def classes(self, key: Key) -> tuple[Workers, ...]:
        """Group the workers that recorded a tensor by its digest, the reference worker's class first."""
        classes: dict[str | None, list[int]] = {}
        reference_record = self._members.reference.records.get(key)
        if reference_record is not None and reference_record.digest is not None:
            classes[_bits(reference_record)] = []
        for number, cohort in enumerate(self._cohorts):
            record = cohort.table.get(key)
            if record is not None and record.digest is not None:
                classes.setdefault(_bits(record), []).append(number)
        names = (self.workers(tuple(numbers), reference_first=True) for numbers in classes.values())
        return self._members.classes(tuple(names))

    def workers(
        self, numbers: tuple[int, ...], positions: Sequence[int] = (), *, reference_first: bool = False
    ) -> Workers:
        """Return the names of the workers of these cohorts, and of the workers at `positions`."""
        key = (numbers, reference_first)
        if not positions and key in self._workers:
            return self._workers[key]
        labels = self._members.names([*positions, *self._positions(numbers)], reference_first=reference_first)
        if not positions:
            self._workers[key] = labels
        return labels


@dataclass(slots=True)
class _Group:
    """A row, the first worker's position, and the cohorts, and the single workers, for which it holds too."""

    row: Outcome
    first: int
    cohorts: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Rows:
    """The rows of a tensor; those that differ in the worker alone become one."""

    groups: list[_Group] = field(default_factory=list)
    # groups by figures that are quick to compare: only these need a comparison of whole rows
    _candidates: dict[tuple[object, ...], list[_Group]] = field(default_factory=dict)

    def add(self, row: Outcome, position: int, cohorts: Sequence[int] = ()) -> None:
        """Take the row of these cohorts, or of the worker at `position` alone."""
        figures = (row.status, row.reference, row.word, row.mismatched, row.max_abs, row.ratio)
        candidates = self._candidates.setdefault(figures, [])
        group = next((group for group in candidates if group.row == row.of(group.row.workers)), None)
        if group is None:
            group = _Group(row, position)
            candidates.append(group)
            self.groups.append(group)
        group.first = min(group.first, position)
        if cohorts:
            group.cohorts += cohorts
        else:
            group.positions.append(position)


def _is_expected(worker: ComparedWorker, reference: ComparedWorker, stage: str) -> bool:
    """Return whether a worker should have the tensors of a stage: its case has the stage, at the same level."""
    is_same_capture = worker.capture is reference.capture
    if SPECS[Stage(stage)].other_rows:
        return False
    if stage in _OF_A_GROUP and not is_same_capture:  # another group may have another size
        return False
    if not worker.expects_stage(stage):  # a stage that others skipped as a whole
        return False
    return is_same_capture or worker.case.level == reference.case.level


def _bits(record: TensorRecord) -> str | None:
    """Return the value in which workers agree: the digest; for copies, that they arrived as sent."""
    return PAYLOAD if record.stage == standard.TRANSFER and is_as_sent(record) else record.digest
