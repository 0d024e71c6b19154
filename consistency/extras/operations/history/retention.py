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
    files: int  # tables that nothing names any more
    kept: int


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
    places = history.names()
    runs = list(history.runs(places))
    if history.damage or len(runs) != len(places):
        raise UsageError(
            "no run is removed from a damaged history",
            where=history.url,
            got="; ".join(history.damage[:3]),
            hint="remove or restore these files first",
        )
    kept = _kept(runs, keep_runs, keep_days)
    times = set(_needed(history, [run for run, is_kept in zip(runs, kept, strict=True) if is_kept]))
    needed = [run.at in times and not is_kept for run, is_kept in zip(runs, kept, strict=True)]
    stay = [is_kept or is_needed for is_kept, is_needed in zip(kept, needed, strict=True)]
    old = [(place, run) for place, run, stays in zip(places, runs, stay, strict=True) if not stays]
    remaining = list(itertools.compress(runs, stay))
    if history.damage:
        raise UsageError("no run is removed from a damaged history", where=history.url, got=history.damage[0])
    first = min((run.at for run in remaining), default="")
    notes = [place for place, note in unfinished(history) if note.at < first]
    unused = [*_unused(history, remaining), *notes]
    if not dry_run:
        for place, _ in reversed(old):
            history.remove(place)
        for place in unused:
            history.remove(place)
        remove_claims(history)
    return Removal(
        runs=tuple(run for _, run in reversed(old)),
        kept_for_drift=tuple(reversed(list(itertools.compress(runs, needed)))),
        files=len(unused),
        kept=len(remaining),
    )


def _kept(runs: Sequence[RunRecord], keep_runs: int | None, keep_days: float | None) -> list[bool]:
    """Return for each run, given from the latest on, whether the user wants it kept."""
    kept: list[bool] = []
    counts: dict[tuple[str, str], int] = {}
    now = datetime.datetime.now(datetime.UTC)
    for run in runs:
        series = (run.host, run.case)
        counts[series] = counts.get(series, 0) + 1
        age = now - run.time
        is_new = keep_days is not None and age <= datetime.timedelta(days=keep_days)
        kept.append(is_new or (keep_runs is not None and counts[series] <= keep_runs))
    return kept


def _needed(history: History, kept: Sequence[RunRecord]) -> Iterator[str]:
    """Yield the times of the runs with which devices are compared that drifted in their latest run."""
    seen: set[WorkerKey] = set()
    for run in kept:
        drifted = [worker for worker in run.workers.select(run.workers.drifted) if worker.drift]
        drifted = [worker for worker in drifted if worker.key not in seen]
        if drifted:
            yield from compared_with(history, msgspec.structs.replace(run, workers=RunWorkers.of(drifted)))
        seen.update(key for key, _, _ in run.workers.observed)


def _unused(history: History, runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yield tables that these runs do not name, and what a killed writer left."""
    named = {seen.table for run in runs for seen in run.workers.seen}
    for folder in (TABLES, RUNS):
        for place in history.files_of(folder):
            name = PurePosixPath(place)
            is_left = name.suffix == ".tmp" or (folder != RUNS and name.stem not in named)
            written = history.modified(place) if is_left else None
            if written is not None and time.time() - written > _GRACE_S:
                yield place
