"""How the workers of a run are kept: what is equal once, whole or not at all, of boxes and of fleets alike."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import msgspec
import pytest

from consistency.errors import UsageError
from consistency.extras.operations.history.drift import find_drift
from consistency.extras.operations.history.records import Observation, RunWorkers
from consistency.extras.operations.history.retention import remove_old
from consistency.extras.operations.history.store import History
from consistency.extras.operations.history.table import device_rows, run_rows
from consistency.numerics.real import Real
from tests.extras.operations.history.made_fleets import (
    BITS,
    at,
    drifted,
    fleet_history,
    fleet_runs,
    incidents,
    name,
    workers,
)

NODES = 9
NIGHTLY = Path(__file__).parents[4] / "docs" / "nightly.md"


@pytest.mark.parametrize("nodes", [1, NODES])
def test_workers_come_back_as_they_were(tmp_path: Path, nodes: int) -> None:
    (run,) = fleet_runs(nodes, 1)
    made = run.workers.select()
    made[3] = msgspec.structs.replace(
        made[3], ratio=Real("nan"), status="lost", bits={}, simulated=True, drift=("a", "b"), driver="", host=""
    )
    more = [msgspec.structs.replace(worker, case="c", load_path="shared") for worker in reversed(made)]
    history = History(str(tmp_path))
    history.append(msgspec.structs.replace(run, workers=RunWorkers.of([*made, *more])), {})
    (stored,) = history.runs()
    assert repr(list(stored.workers)) == repr([*made, *more])
    assert [w.name for w in stored.workers.select({"GPU-0000-0", name(0, 7)}, case={""})] == [name(0, 0), name(0, 7)]
    assert (len(stored.workers), len(stored.workers.devices), stored.workers.lost) == (16 * nodes, 8 * nodes, 2)


def test_what_is_equal_is_stored_once(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, NODES, 5)
    assert [len(run.workers.seen) for run in history.runs()] == [1] * 5
    assert all(path.stat().st_size < 4000 for path in (tmp_path / "runs").iterdir())


def test_a_history_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """Its runs name their devices in files of another folder."""
    (tmp_path / "rosters").mkdir()
    with pytest.raises(UsageError, match="was written by an earlier version"):
        History(str(tmp_path))


def test_boxes_and_fleets_are_one_history(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, NODES, 2, lambda run, w: drifted(w) if run and w.name == name(3, 0) else w)
    (alone,) = fleet_runs(1, 1)
    history.append(msgspec.structs.replace(alone, at="2026-02-01T02:00:00.000000+00:00", host="box"), {})
    rows = run_rows(history, 0)
    assert [(row.devices, row.drifted, row.drifted_devices) for row in rows] == [
        (8, (), 0), (72, (name(3, 0),), 1), (72, (), 0),
    ]  # fmt: skip
    assert [row.at[:7] for row in device_rows(history, "GPU-0000-0", 0)] == ["2026-02", "2026-01", "2026-01"]
    seen = [(run.at, worker.host or run.host, worker) for run in history.runs() for worker in run.workers]
    here = [run for run, host, _ in seen if host in ("box", "gpu-0000")]
    assert (len(here), len(set(here))) == (24, 3)
    assert "box" not in {host for _, host, _ in seen}
    assert [worker.device for _, _, worker in seen if worker.drift] == ["GPU-0003-0"]
    assert len(list(history.runs())) == 3


def test_values_in_the_file_of_a_run_are_those_of_the_records(tmp_path: Path) -> None:
    """As `docs/nightly.md` names them for other programs: NaN and infinity too, which are beyond any tolerance."""
    ratios = {name(0, 1): Real("nan"), name(0, 2): Real("inf")}
    fleet_history(tmp_path, 1, 1, lambda _, w: msgspec.structs.replace(w, ratio=ratios.get(w.name, w.ratio)))
    (path,) = (tmp_path / "runs").iterdir()
    run = json.loads(path.read_text())
    assert run.keys() == {"schema", "at", "host", "case", "verdict", "tool", "workers"}, "what is empty is left out"
    assert run["schema"] == "consistency.history/2"
    rows, seen = run["workers"]["rows"], run["workers"]["seen"]
    assert [row[:3] for row in rows[:2]] == [[name(0, n), f"GPU-0000-{n}", "gpu-0000"] for n in range(2)]
    assert [seen[row[3]]["ratio"] for row in rows[:4]] == [0.5, "nan", "inf", 0.5]
    assert {*seen[0]} == {
        "load_path", "architecture", "model", "status", "software", "inputs", "bits", "table", "verdict", "ratio",
        "driver",
    }  # fmt: skip
    assert all((one["bits"], one["table"]) == (BITS, "0" * 64) for one in seen)
    page = NIGHTLY.read_text(encoding="utf-8")
    assert [field for field in Observation.__struct_fields__ if f"`{field}`" not in page] == []


@pytest.mark.process
@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_the_question_to_the_files_of_runs_that_a_page_has(tmp_path: Path) -> None:
    """It names each device that drifts, and its first run with that."""
    fleet_history(tmp_path, NODES, 12, incidents)
    (question,) = re.findall(r"^jq -r .*?sort [^\n]*$", NIGHTLY.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    ran = subprocess.run(
        ["sh", "-c", question.replace("HISTORY", '"$0"'), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ran.stdout == f"GPU-0004-3\t{at(6)}\n"


def test_a_list_of_runs_has_the_first_of_many(tmp_path: Path) -> None:
    (run,) = fleet_runs(NODES, 1, lambda _, w: drifted(w))
    history = History(str(tmp_path))
    history.append(msgspec.structs.replace(run, findings=tuple(f"finding {number}" for number in range(70))), {})
    (row,) = run_rows(history, 0)
    assert (row.drifted, row.drifted_devices) == (tuple(name(n // 8, n % 8) for n in range(16)), 72)
    assert row.findings[62:] == ("finding 62", "finding 63", "and 6 more findings")


def test_a_url_keeps_a_fleet_too() -> None:
    url = "memory://fleet-of-a-test"
    fleet_history(url, NODES, 2, lambda run, w: drifted(w) if run and w.name == name(3, 0) else w)
    assert [len(run.workers.select({name(3, 0)})) for run in History(url).runs()] == [1, 1]
    assert sum(bool(worker.drift) for run in History(url).runs() for worker in run.workers) == 1


def test_a_writer_that_was_killed_leaves_a_readable_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = fleet_history(tmp_path, NODES, 1)
    (more,) = fleet_runs(NODES + 1, 1)
    real = History._put

    def put(self: History, folder: str, name: str, raw: bytes) -> None:
        if folder == "runs":
            raise KeyboardInterrupt
        real(self, folder, name, raw)

    monkeypatch.setattr(History, "_put", put)
    with pytest.raises(KeyboardInterrupt):
        history.append(more, {})
    (tmp_path / "runs" / "20990101T000000-ffffffff.json.1234.tmp").write_bytes(b"{ cut sho")
    assert [row.devices for row in run_rows(History(str(tmp_path)), 0)] == [72]


def test_many_writers_at_once(tmp_path: Path) -> None:
    runs = list(fleet_runs(NODES, 6))
    threads = [threading.Thread(target=History(str(tmp_path)).append, args=(run, {"t": b"{}"})) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = History(str(tmp_path))
    assert [len(run.workers) for run in history.runs()] == [72] * 6
    assert history.damage == []
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["t.json"]


def test_two_writers_of_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one writes all of it while the first one is about to rename its own."""
    real = os.replace

    def replace(source: Path, target: str) -> None:
        monkeypatch.setattr(os, "replace", real)
        History(str(tmp_path)).put_tables({"t": b"{}"})
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    History(str(tmp_path)).put_tables({"t": b"{}"})
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["t.json"]


@pytest.mark.parametrize("place", [1, -1])
def test_a_worker_of_which_nothing_was_seen_is_damage(tmp_path: Path, place: int) -> None:
    fleet_history(tmp_path, NODES, 1)
    (path,) = (tmp_path / "runs").iterdir()
    run = json.loads(path.read_text())
    run["workers"]["rows"][0][3] = place
    path.write_text(json.dumps(run))
    history = History(str(tmp_path))
    assert list(history.runs()) == []
    (text,) = history.damage
    assert f"nothing was seen of the worker {name(0, 0)}" in text
    with pytest.raises(UsageError, match="no run is removed from a damaged history"):
        remove_old(History(str(tmp_path)), keep_runs=1)


def test_of_a_fleet_equal_drift_is_one_finding(tmp_path: Path) -> None:
    table = b'{"merged::l.weight":"1"}'
    other = b'{"merged::l.weight":"2"}'
    history = History(str(tmp_path))
    (before,) = fleet_runs(NODES, 1, lambda _, w: msgspec.structs.replace(w, table=_name(table)))
    history.append(before, {_name(table): table})
    hit = {name(3, 1), name(3, 2)}
    (now,) = fleet_runs(
        NODES, 1, lambda _, w: msgspec.structs.replace(drifted(w), table=_name(other)) if w.name in hit
        else msgspec.structs.replace(w, table=_name(table)),
    )  # fmt: skip
    (finding,), stages = find_drift(history, now, {_name(table): table, _name(other): other})
    assert set(finding.workers) == hit
    assert finding.message == (
        f"drift · {name(3, 1)}, {name(3, 2)} · 1 of 1 merged tensors differ bitwise "
        "from the run of 2026-01-01 02:00:00 UTC: "
        "same inputs, same software"
    )
    assert stages == {(f"GPU-0003-{gpu}", "isolated"): ("merged",) for gpu in (1, 2)}


def test_a_new_device_is_looked_for_in_every_run_and_never_drifts(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, NODES, 3)
    new = workers(NODES + 1)[-1]
    (now,) = fleet_runs(NODES, 1)
    assert find_drift(history, msgspec.structs.replace(now, workers=RunWorkers.of([*now.workers, new])), {}) == ([], {})


def _name(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
