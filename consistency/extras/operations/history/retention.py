"""Remove old runs of a history: only when asked to, and never those that the drift of a device is judged by.

A run disappears with its one file. Files that no run names any more go afterwards, so whoever stops this in the middle
leaves a history that is whole, and some files for the next time. A file of the last day stays: the run that names it
may not be written yet.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import msgspec

from consistency.errors import UsageError
from consistency.extras.operations.history.drift import compared_with
from consistency.extras.operations.history.records import RunRecord, RunWorkers, WorkerKey
from consistency.extras.operations.history.store import RUNS, TABLES, History, remove_claims, unfinished

_GRACE_S = 86_400.0
"""A day: longer than a suite of thousands of cases takes between its first table and its entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What is removed of a history."""

    runs: tuple[RunRecord, ...]  # the earliest first
    kept_for_drift: tuple[RunRecord, ...]  # old runs that stay, as a device that drifts is compared with them
    files: int  # number of files that nothing names any more
    kept: int  # number of runs that stay


def remove_old(
    history: History, *, keep_runs: int | None = None, keep_days: float | None = None, dry_run: bool = False
) -> Removal:
    """Remove all but the latest `keep_runs` runs of each host and case, and those older than `keep_days`.

    With both, a run stays that either of them keeps.

    Raises
    ------
    UsageError
        Nothing would be kept, or a run cannot be read: what it needs is unknown.
    """
    if (keep_runs is None or keep_runs < 1) and (keep_days is None or keep_days <= 0):
        raise UsageError("nothing would be kept", where="--keep-runs or --keep-days", wanted="more than 0")
    with history.alone():
        return _remove_old(history, keep_runs, keep_days, dry_run=dry_run)


def _remove_old(history: History, keep_runs: int | None, keep_days: float | None, *, dry_run: bool) -> Removal:
    """Do the work of `remove_old`, while no other process of this host removes runs."""
    places = history.names()
    runs = list(history.runs(places))
    if history.damage or len(runs) != len(places):
        raise UsageError(
            "no run is removed from a damaged history",
            where=history.url,
            got="; ".join(history.damage[:3]),
            hint="remove or restore these files first",
        )
    is_wanted = _wanted_runs(runs, keep_runs, keep_days)
    times_for_drift = set(_times_for_drift(history, list(itertools.compress(runs, is_wanted))))
    old: list[tuple[str, RunRecord]] = []  # runs that go, with their paths
    remaining: list[RunRecord] = []
    kept_for_drift: list[RunRecord] = []
    for place, run, wanted in zip(places, runs, is_wanted, strict=True):
        if wanted:
            remaining.append(run)
        elif run.at in times_for_drift:
            remaining.append(run)
            kept_for_drift.append(run)
        else:
            old.append((place, run))
    # the search for drift has read runs again: one of them may have been damaged since
    if history.damage:
        raise UsageError("no run is removed from a damaged history", where=history.url, got=history.damage[0])
    first = min((run.at for run in remaining), default="")
    notes = [place for place, note in unfinished(history) if note.at < first]
    unused = [*_unused_files(history, remaining), *notes]
    if not dry_run:
        # the earliest run goes first, and files only after the runs that name them
        for place, _ in reversed(old):
            history.remove(place)
        for place in unused:
            history.remove(place)
        remove_claims(history)
    return Removal(
        runs=tuple(run for _, run in reversed(old)),
        kept_for_drift=tuple(reversed(kept_for_drift)),
        files=len(unused),
        kept=len(remaining),
    )


def _wanted_runs(runs: Sequence[RunRecord], keep_runs: int | None, keep_days: float | None) -> list[bool]:
    """Return for each run, given from the latest on, whether the user wants it kept."""
    is_wanted: list[bool] = []
    counts: dict[tuple[str, str], int] = {}
    now = datetime.datetime.now(datetime.UTC)
    for run in runs:
        series = (run.host, run.case)
        counts[series] = counts.get(series, 0) + 1
        age = now - run.time
        is_new = keep_days is not None and age <= datetime.timedelta(days=keep_days)
        is_among_latest = keep_runs is not None and counts[series] <= keep_runs
        is_wanted.append(is_new or is_among_latest)
    return is_wanted


def _times_for_drift(history: History, runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yield the times of the runs with which devices are compared that drifted in their latest run.

    `runs` are those that the user wants kept, from the latest on.
    """
    later_workers: set[WorkerKey] = set()
    for run in runs:
        drifted = [
            worker
            for worker in run.workers.select(run.workers.drifted)
            if worker.drift and worker.key not in later_workers
        ]
        if drifted:
            yield from compared_with(history, msgspec.structs.replace(run, workers=RunWorkers.of(drifted)))
        later_workers.update(key for key, _, _ in run.workers.observed)


def _unused_files(history: History, runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yield tables that these runs do not name, and files of killed writers, which are a day old."""
    named_tables: set[str] = set()
    for run in runs:
        named_tables.update(observation.table for observation in run.workers.seen)
    for folder in (TABLES, RUNS):
        for place in history.files_of(folder):
            name = PurePosixPath(place)
            is_unused_table = folder != RUNS and name.stem not in named_tables
            is_unused = name.suffix == ".tmp" or is_unused_table
            written_s = history.modified(place) if is_unused else None
            if written_s is not None and time.time() - written_s > _GRACE_S:
                yield place
