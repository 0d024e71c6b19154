"""Find what changed in a history, and since when, by device: drift, software, inputs, lost workers, missing devices.

Runs are gone through once, the earliest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from consistency.extras.operations.history.records import Observation, RunRecord, RunWorkers, WorkerKey


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
    """What changed, in the same run, for some workers."""

    kind: ChangeKind
    since: str  # the first run with it
    before: str | None  # the last run of these workers without it; None where it was so in their first
    until: str | None  # the first run without it again; None where it lasts, and for what has no end
    detail: str  # the stage that drifted; what changed, as far as it is known
    devices: int  # number of devices
    workers: tuple[str, ...]  # names as of that run; names of missing devices as of the last run that had them


def changes(runs: Iterable[RunRecord]) -> list[Change]:
    """Return what changed over these runs, given the earliest first: the latest change comes first.

    A device is missing from a run of its case that shares at least half of its devices with an earlier one: a run
    that shares fewer is of other devices.
    """
    finder = _Finder()
    for run in runs:
        finder.take(run)
    return finder.all_changes()


_Condition = tuple[ChangeKind, str]
"""Kind and detail of a change that lasts."""
"""What a change is about, and its detail."""

_GONE: _Condition = (ChangeKind.GONE, "")

_Begin = tuple[str, str | None, str]
"""Time of the run in which a change began, time of the last run of the worker before it, and the worker's name."""
"""In which run it began, the last run of the worker before that, and the worker's name."""


@dataclass(slots=True)
class _Series:
    """Runs of one case on mostly the same devices, of which the latest is kept."""

    case: str
    at: str  # time of the latest run
    present: dict[str, str]  # names of its devices, by identity


class _Finder:
    """Find changes run by run."""

    def __init__(self) -> None:
        self._latest: dict[WorkerKey, tuple[RunRecord, Observation]] = {}
        self._ended_well: dict[WorkerKey, Observation] = {}  # latest observation of a worker that was not lost
        self._devices: set[str] = set()  # identities of all devices so far
        self._series: list[_Series] = []
        self._open: dict[tuple[WorkerKey, _Condition], _Begin] = {}  # conditions that last, with their begin
        # devices and names of the workers of a change, by all that they have in common: a dict keeps their order
        self._changes: dict[tuple[_Condition, str, str | None, str | None], dict[tuple[str, str], None]] = {}

    def take(self, run: RunRecord) -> None:
        """Take the next run."""
        if run.workers:
            self._take_devices(run)
        without_workers = msgspec.structs.replace(run, workers=RunWorkers())  # `_latest` keeps it for each worker
        for key, name, observation in run.workers.observed:
            self._take_worker(without_workers, key, name, observation)

    def all_changes(self) -> list[Change]:
        """Return all changes, after the last run."""
        for key, condition in list(self._open):
            self._close(key, condition, None)
        all_changes = []
        for ((kind, detail), since, before, until), workers in self._changes.items():
            change = Change(
                kind=kind,
                since=since,
                before=before,
                until=until,
                detail=detail,
                devices=len({device for device, _ in workers}),
                workers=tuple(dict.fromkeys(name for _, name in workers)),
            )
            all_changes.append(change)
        return sorted(all_changes, key=lambda change: change.since, reverse=True)

    def _take_devices(self, run: RunRecord) -> None:
        """Find the devices that are gone, back and new."""
        present: dict[str, str] = {}
        for (device, _, _), name, _ in run.workers.observed:
            present.setdefault(device, name)
        matching = [series for series in self._series if series.case == run.case and _is_half(series.present, present)]
        if matching:
            # several hosts may run one case: the series with the most devices in common goes on
            series = max(matching, key=lambda series: (len(series.present.keys() & present.keys()), series.at))
            self._compare_devices(run, series, present)
            series.present, series.at = present, run.at
        else:
            self._series.append(_Series(run.case, run.at, present))
        self._devices |= present.keys()

    def _compare_devices(self, run: RunRecord, series: _Series, present: dict[str, str]) -> None:
        """Compare the devices of a run with those of the run before in its series."""
        for device in series.present.keys() - present.keys():
            self._open[(device, "", run.case), _GONE] = run.at, series.at, series.present[device]
        for device in present.keys() - series.present.keys():
            if ((device, "", run.case), _GONE) in self._open:
                self._close((device, "", run.case), _GONE, run.at)
            elif device not in self._devices:
                self._add((ChangeKind.NEW, ""), (run.at, series.at, present[device]), None, device)

    def _take_worker(self, run: RunRecord, key: WorkerKey, name: str, observation: Observation) -> None:
        """Find the conditions of a worker that end and begin with a run, and what is new about its bits."""
        earlier_run, earlier_observation = self._latest.get(key, (None, None))
        self._latest[key] = run, observation
        begin = run.at, None if earlier_run is None else earlier_run.at, name
        conditions, earlier_conditions = _conditions(observation), _conditions(earlier_observation)
        for condition in earlier_conditions:
            if condition not in conditions:
                self._close(key, condition, run.at)
        for condition in conditions:
            if condition not in earlier_conditions:
                self._open[key, condition] = begin
        # a lost worker may not have recorded its software and inputs: they are compared with the last run that ended
        if observation.status != "ok":
            return
        earlier_whole = self._ended_well.get(key, observation)
        self._ended_well[key] = observation
        if earlier_run is not None and earlier_whole.software != observation.software:
            detail = _software_changes(earlier_run, run, earlier_whole, observation)
            self._add((ChangeKind.SOFTWARE, detail), begin, None, key[0])
        if earlier_whole.inputs != observation.inputs:
            self._add((ChangeKind.INPUTS, ""), begin, None, key[0])

    def _close(self, key: WorkerKey, condition: _Condition, until: str | None) -> None:
        """Add the change of a condition that has ended, or that lasts where `until` is None."""
        self._add(condition, self._open.pop((key, condition)), until, key[0])

    def _add(self, condition: _Condition, begin: _Begin, until: str | None, device: str) -> None:
        """Add a device to the change that has this kind, begin and end."""
        since, before, name = begin
        self._changes.setdefault((condition, since, before, until), {})[device, name] = None


def _conditions(observation: Observation | None) -> tuple[_Condition, ...]:
    """Return what is the matter with a worker in a run, the most serious alone; nothing without an observation."""
    if observation is None:
        return ()
    if observation.status != "ok":
        return ((ChangeKind.LOST, ""),)
    if observation.drift:
        return tuple((ChangeKind.DRIFT, stage) for stage in observation.drift)
    return ((ChangeKind.INCONSISTENT, ""),) if observation.verdict == "inconsistent" else ()


def _software_changes(earlier_run: RunRecord, run: RunRecord, earlier: Observation, now: Observation) -> str:
    """Return the versions and drivers that changed; one that only one of both runs recorded is no change."""
    versions = [(name, earlier_run.versions.get(name, version), version) for name, version in run.versions.items()]
    versions.append(("driver", earlier.driver or now.driver, now.driver or earlier.driver))
    return ", ".join(f"{name} {before} -> {after}" for name, before, after in versions if before != after)


def _is_half(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether two sets of devices have at least half of the larger one in common."""
    return 2 * len(before.keys() & now.keys()) >= max(len(before), len(now))
