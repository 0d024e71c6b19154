"""Since when: what changed in a history, by device: drift, software, inputs, lost workers, devices that are gone.

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
    workers: tuple[str, ...]  # names as of that run; of what is gone, as of the last run that had it


def changes(runs: Iterable[RunRecord]) -> list[Change]:
    """Return what changed over these runs, given the earliest first: the latest change comes first.

    A device is missing from a run of its case that shares at least half of its devices with an earlier one: a run
    that shares fewer is of other devices.
    """
    finder = _Finder()
    for run in runs:
        finder.take(run)
    return finder.found()


_Condition = tuple[ChangeKind, str]
"""What a change is about, and its detail."""

_GONE: _Condition = (ChangeKind.GONE, "")

_Begun = tuple[str, str | None, str]
"""In which run it began, the last run of the worker before that, and the worker's name."""


@dataclass(slots=True)
class _Series:
    """Runs of one case and mostly the same devices: time and devices, with their names, of the latest one."""

    case: str
    at: str
    present: dict[str, str]


class _Finder:
    """Finds changes run by run."""

    def __init__(self) -> None:
        self._latest: dict[WorkerKey, tuple[RunRecord, Observation]] = {}
        self._ended_well: dict[WorkerKey, Observation] = {}
        self._devices: set[str] = set()
        self._series: list[_Series] = []
        self._open: dict[tuple[WorkerKey, _Condition], _Begun] = {}
        self._found: dict[tuple[_Condition, str, str | None, str | None], dict[tuple[str, str], None]] = {}

    def take(self, run: RunRecord) -> None:
        """Take the next run."""
        if run.workers:
            self._take_devices(run)
        told = msgspec.structs.replace(run, workers=RunWorkers())
        for key, name, seen in run.workers.observed:
            self._take_worker(told, key, name, seen)

    def found(self) -> list[Change]:
        """Return all changes."""
        for key, condition in list(self._open):
            self._close(key, condition, None)
        made = [
            Change(
                kind=kind,
                since=since,
                before=before,
                until=until,
                detail=detail,
                devices=len({device for device, _ in names}),
                workers=tuple(dict.fromkeys(name for _, name in names)),
            )
            for ((kind, detail), since, before, until), names in self._found.items()
        ]
        return sorted(made, key=lambda change: change.since, reverse=True)

    def _take_devices(self, run: RunRecord) -> None:
        """Find the devices that are gone, back and new."""
        now: dict[str, str] = {}
        for (device, _, _), name, _ in run.workers.observed:
            now.setdefault(device, name)
        alike = [one for one in self._series if one.case == run.case and _is_half(one.present, now)]
        if not alike:
            self._series.append(_Series(run.case, run.at, now))
        else:
            series = max(alike, key=lambda one: (len(one.present.keys() & now.keys()), one.at))
            then = series.present
            for device in then.keys() - now.keys():
                self._open[(device, "", run.case), _GONE] = run.at, series.at, then[device]
            for device in now.keys() - then.keys():
                if ((device, "", run.case), _GONE) in self._open:
                    self._close((device, "", run.case), _GONE, run.at)
                elif device not in self._devices:
                    self._add((ChangeKind.NEW, ""), (run.at, series.at, now[device]), None, device)
            series.present, series.at = now, run.at
        self._devices |= now.keys()

    def _take_worker(self, run: RunRecord, key: WorkerKey, name: str, seen: Observation) -> None:
        before, last = self._latest.get(key, (None, None))
        self._latest[key] = run, seen
        begun = run.at, None if before is None else before.at, name
        now, then = _conditions(seen), _conditions(last)
        for condition in then:
            if condition not in now:
                self._close(key, condition, run.at)
        self._open |= {(key, condition): begun for condition in now if condition not in then}
        if seen.status != "ok":
            return
        known = self._ended_well.get(key, seen)
        self._ended_well[key] = seen
        if before is not None and known.software != seen.software:
            self._add((ChangeKind.SOFTWARE, _of_software(before, run, known, seen)), begun, None, key[0])
        if known.inputs != seen.inputs:
            self._add((ChangeKind.INPUTS, ""), begun, None, key[0])

    def _close(self, key: WorkerKey, condition: _Condition, until: str | None) -> None:
        self._add(condition, self._open.pop((key, condition)), until, key[0])

    def _add(self, condition: _Condition, begun: _Begun, until: str | None, device: str) -> None:
        since, before, name = begun
        self._found.setdefault((condition, since, before, until), {})[device, name] = None


def _conditions(seen: Observation | None) -> tuple[_Condition, ...]:
    """Return what is the matter with a worker in a run."""
    if seen is None:
        return ()
    if seen.status != "ok":
        return ((ChangeKind.LOST, ""),)
    if seen.drift:
        return tuple((ChangeKind.DRIFT, stage) for stage in seen.drift)
    return ((ChangeKind.INCONSISTENT, ""),) if seen.verdict == "inconsistent" else ()


def _of_software(before: RunRecord, run: RunRecord, then: Observation, now: Observation) -> str:
    pairs = [(name, before.versions.get(name, version), version) for name, version in run.versions.items()]
    pairs.append(("driver", then.driver or now.driver, now.driver or then.driver))
    return ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)


def _is_half(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    return 2 * len(before.keys() & now.keys()) >= max(len(before), len(now))
