"""Since when: what changed in a history, with its date, and nothing for what did not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from consistency.extras.operations.history.changes import Change, ChangeKind, changes
from consistency.extras.operations.history.records import RunRecord, RunWorkers, WorkerRecord
from consistency.extras.operations.history.store import History
from tests.extras.operations.history.made_fleets import at, drifted, fleet_history, fleet_runs, incidents, name

NODES = 9  # of eight devices


def found(history: History) -> list[Change]:
    return changes(history.runs(list(reversed(history.names()))))


def of(runs: list[RunRecord], tmp_path: Path) -> list[tuple[Any, ...]]:
    history = History(str(tmp_path / "history"))
    for run in runs:
        history.append(run, {})
    return [(c.kind, c.since, c.before, c.until, c.devices) for c in found(history)]


def test_nothing_is_said_of_a_healthy_fleet(tmp_path: Path) -> None:
    assert found(fleet_history(tmp_path, NODES, 12)) == []


def test_one_box_has_the_same_changes(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, 8, 12, lambda run, w: incidents(run, w))
    assert [change.kind for change in found(history)] == [ChangeKind.SOFTWARE, ChangeKind.DRIFT]


def test_what_is_over_has_an_end(tmp_path: Path) -> None:
    def happens(run: int, worker: WorkerRecord) -> WorkerRecord | None:
        if worker.name == name(0, 0) and run in (3, 4):
            return drifted(worker)
        if worker.name == name(0, 1) and run == 5:
            return msgspec.structs.replace(worker, status="lost", bits={}, software="?", inputs="?")
        return None if worker.host == "gpu-0002" and run in (6, 7) else worker

    gone, lost, drift = found(fleet_history(tmp_path, NODES, 10, happens))
    assert (drift.kind, drift.since, drift.until) == (ChangeKind.DRIFT, at(3), at(5))
    assert (lost.kind, lost.since, lost.until) == (ChangeKind.LOST, at(5), at(6)), "a lost worker has no software"
    assert (gone.kind, gone.since, gone.until, gone.devices) == (ChangeKind.GONE, at(6), at(8), 8)


def test_new_devices_and_other_inputs(tmp_path: Path) -> None:
    def happens(run: int, worker: WorkerRecord) -> WorkerRecord | None:
        if worker.host == "gpu-0000" and run < 2:
            return None
        return msgspec.structs.replace(worker, inputs="j") if run >= 4 else worker

    inputs, new = found(fleet_history(tmp_path, NODES + 1, 6, happens))
    assert (new.kind, new.since, new.devices) == (ChangeKind.NEW, at(2), 8)
    assert (inputs.kind, inputs.since, inputs.devices) == (ChangeKind.INPUTS, at(4), 80)


def test_a_run_of_some_nodes_misses_no_device(tmp_path: Path) -> None:
    """Two nodes were checked again, and another case ran on three: the others are not gone."""
    runs = list(fleet_runs(NODES, 6))
    runs[2] = msgspec.structs.replace(runs[2], workers=RunWorkers.of(runs[2].workers.select()[:16]))
    runs[4] = msgspec.structs.replace(runs[4], workers=RunWorkers.of(runs[4].workers.select()[:24]), case="other")
    assert of(runs, tmp_path) == []


def test_what_the_first_run_had_may_be_older(tmp_path: Path) -> None:
    (drift,) = found(fleet_history(tmp_path, NODES, 3, lambda _, w: drifted(w) if w.name == name(1, 1) else w))
    assert (drift.since, drift.before, drift.until) == (at(0), None, None)


def test_versions_are_named_where_the_run_has_others(tmp_path: Path) -> None:
    runs = list(fleet_runs(NODES, 4, lambda run, w: msgspec.structs.replace(w, software="t") if run > 1 else w))
    runs = [msgspec.structs.replace(r, versions={"torch": "2.9" if n > 1 else "2.8"}) for n, r in enumerate(runs)]
    history = History(str(tmp_path / "history"))
    for run in runs:
        history.append(run, {})
    (update,) = found(history)
    assert (update.detail, update.devices) == ("torch 2.8 -> 2.9", 72)
