"""Since when: what changed in a history, by device: drift, software, inputs, lost workers, devices that are gone.

Runs are gone through once, the earliest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from weakref import WeakValueDictionary

import msgspec

from consistency.comparison.history.cohorts import Observation, RunWorkers, WorkerKey
from consistency.comparison.history.records import RunRecord


class ChangeKind(StrEnum):
    """What a change is about."""

    DRIFT = "drift"
    SOFTWARE = "software"
    INPUTS = "inputs"
    LOST = "lost"
    INCONSISTENT = "inconsistent"
    GONE = "gone"
    NEW = "new"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What changed, in the same run, for some workers.

    Attributes
    ----------
    since : str
        The first run with it.
    before : str or None
        The last run of these workers without it; None where it was so in their first.
    until : str or None
        The first run without it again; None where it lasts, and for what has no end.
    detail : str
        The stage that drifted; what changed, as far as it is known.
    devices : int
        Number of devices.
    workers : tuple of str
        Names as of that run; of what is gone, as of the last run that had it.
    """

    kind: ChangeKind
    since: str
    before: str | None
    until: str | None
    detail: str
    devices: int
    workers: tuple[str, ...]


def changes(runs: Iterable[RunRecord]) -> list[Change]:
    """Return what changed over these runs, given the earliest first: the latest change comes first.

    A device is missing from a run of its case that shares at least half of its devices with an earlier one: a run
    that shares fewer is of other devices.
    """
    finder = _Finder()
    for run in runs:
        finder.take(run)
    return finder.found()


@dataclass(frozen=True, slots=True)
class _Condition:
    """What a change is about, and its detail."""

    kind: ChangeKind
    detail: str = ""


_GONE = _Condition(ChangeKind.GONE)


@dataclass(slots=True)
class _Opened:
    """A condition that has begun: in which run, the last run of the worker before it, and its name."""

    since: int
    before: int | None
    name: str


@dataclass(slots=True)
class _Worker:
    """What was seen of a worker in its latest run; `ended_well` is of the latest one in which it was not lost."""

    streak: int
    seen: Observation
    ended_well: Observation | None


@dataclass(slots=True)
class _Series:
    """Runs of one case and mostly the same devices: the devices of the latest one, with their names."""

    case: str
    streak: int
    present: dict[str, str]


class _Finder:
    """Finds changes run by run.

    Runs that follow each other and saw the same are a streak, of which only the first one is gone through.
    """

    def __init__(self) -> None:
        self._runs: list[RunRecord] = []  # without their workers
        self._latest: RunRecord | None = None
        self._streaks: list[int] = []  # the last run of each
        self._workers: dict[WorkerKey, _Worker] = {}
        self._observations = WeakValueDictionary[int, Observation]()  # by state
        self._versions: dict[int, Mapping[str, object]] = {}  # by streak
        self._devices: set[str] = set()
        self._series: list[_Series] = []
        self._open: dict[tuple[WorkerKey, _Condition], _Opened] = {}
        self._found: dict[tuple[_Condition, int, int | None, int | None], dict[tuple[str, str], None]] = {}

    def take(self, run: RunRecord) -> None:
        """Take the next run."""
        if not run.workers:
            return
        number = len(self._runs)
        before, self._latest = self._latest, run
        self._runs.append(msgspec.structs.replace(run, workers=RunWorkers()))
        if before is not None and _seen(before) == _seen(run):
            self._streaks[-1] = number
            return
        self._streaks.append(number)
        streak = len(self._streaks) - 1
        self._versions[streak] = run.versions
        present: dict[str, str] = {}
        changed: list[tuple[WorkerKey, str, Observation]] = []
        for cohort in run.workers.cohorts:
            seen = self._observations.setdefault(cohort.state, cohort)
            for device, name in run.workers.members(cohort):
                key = (device, cohort.load_path, cohort.case)
                present.setdefault(device, name)
                worker = self._workers.get(key)
                if worker is not None and worker.seen is seen and worker.ended_well is seen:
                    worker.streak = streak
                else:
                    changed.append((key, name, seen))
        self._take_devices(run.case, present)
        for key, name, seen in changed:
            self._take_worker(key, name, seen)

    def found(self) -> list[Change]:
        """Return all changes."""
        for (key, condition), opened in self._open.items():
            self._add(condition, opened, None, key[0])
        self._open = {}
        made = []
        for (condition, since, before, until), names in self._found.items():
            change = Change(
                kind=condition.kind,
                since=self._runs[since].at,
                before=None if before is None else self._runs[before].at,
                until=None if until is None else self._runs[until].at,
                detail=condition.detail,
                devices=len({device for device, _ in names}),
                workers=tuple(dict.fromkeys(name for _, name in names)),
            )
            made.append(change)
        return sorted(made, key=lambda change: change.since, reverse=True)

    def _take_devices(self, case: str, present: dict[str, str]) -> None:
        """Find the devices that are gone, back and new."""
        number = self._streaks[-1]
        alike = [one for one in self._series if one.case == case and _is_half(one.present, present)]
        if not alike:
            self._series.append(_Series(case, len(self._streaks) - 1, present))
            self._devices |= present.keys()
            return
        series = max(alike, key=lambda one: (len(one.present.keys() & present.keys()), one.streak))
        for device in series.present.keys() - present.keys():
            gone = _Opened(number, self._streaks[series.streak], series.present[device])
            self._open[(device, "", case), _GONE] = gone
        for device in present.keys() - series.present.keys():
            missed = self._open.pop(((device, "", case), _GONE), None)
            if missed is not None:
                self._add(_GONE, missed, number, device)
            elif device not in self._devices:
                new = _Opened(number, self._streaks[series.streak], present[device])
                self._add(_Condition(ChangeKind.NEW), new, None, device)
        self._devices |= present.keys()
        series.present, series.streak = present, len(self._streaks) - 1

    def _take_worker(self, key: WorkerKey, name: str, seen: Observation) -> None:
        streak, number = len(self._streaks) - 1, self._streaks[-1]
        last = self._workers.get(key)
        before = None if last is None else self._streaks[last.streak]
        now, then = _conditions(seen), () if last is None else _conditions(last.seen)
        for condition in then:
            if condition not in now:
                self._add(condition, self._open.pop((key, condition)), number, key[0])
        for condition in now:
            if condition not in then:
                self._open[key, condition] = _Opened(number, before, name)
        is_well = seen.status == "ok"
        if is_well and last is not None and last.ended_well is not None:
            known, opened = last.ended_well, _Opened(number, before, name)
            if known.software != seen.software:
                detail = self._of_software(last.streak, known, seen)
                self._add(_Condition(ChangeKind.SOFTWARE, detail), opened, None, key[0])
            if known.inputs != seen.inputs:
                self._add(_Condition(ChangeKind.INPUTS), opened, None, key[0])
        self._workers[key] = _Worker(streak, seen, seen if is_well else None if last is None else last.ended_well)

    def _of_software(self, streak: int, before: Observation, now: Observation) -> str:
        then, versions = self._versions[streak], self._runs[self._streaks[-1]].versions
        texts = [
            f"{name} {then[name]} -> {version}"
            for name, version in versions.items()
            if then.get(name, version) != version
        ]
        if before.driver and now.driver and before.driver != now.driver:
            texts.append(f"driver {before.driver} -> {now.driver}")
        return ", ".join(texts)

    def _add(self, condition: _Condition, opened: _Opened, until: int | None, device: str) -> None:
        same = (condition, opened.since, opened.before, until)
        self._found.setdefault(same, {})[device, opened.name] = None


def _seen(run: RunRecord) -> tuple[object, ...]:
    return run.case, run.versions, run.workers


def _conditions(worker: Observation) -> tuple[_Condition, ...]:
    """Return what is the matter with a worker in a run."""
    if worker.status != "ok":
        return (_Condition(ChangeKind.LOST),)
    if worker.drift:
        return tuple(_Condition(ChangeKind.DRIFT, stage) for stage in worker.drift)
    return (_Condition(ChangeKind.INCONSISTENT),) if worker.verdict == "inconsistent" else ()


def _is_half(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    return 2 * len(before.keys() & now.keys()) >= max(len(before), len(now))
