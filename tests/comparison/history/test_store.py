"""Where a fleet's workers are kept: what is equal once, whole or not at all, and as one with the records of boxes."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from consistency.cli.main import main
from consistency.comparison.history.drift import find_drift
from consistency.comparison.history.sql import query
from consistency.comparison.history.store import History
from consistency.errors import UsageError
from consistency.numerics.real import Real
from consistency.report.history import device_rows, run_rows
from tests.comparison.history.made_fleets import drifted, fleet_history, fleet_runs, name, workers

NODES = 9


@pytest.fixture(autouse=True)
def _with_duckdb() -> None:
    for module in ("duckdb", "pytz"):
        pytest.importorskip(module, reason=f"{module} is not installed: pip install '.[history]'")


def parquet(folder: Path) -> list[Path]:
    return sorted((folder / "workers").iterdir())


def test_workers_come_back_as_they_were(tmp_path: Path) -> None:
    (run,) = fleet_runs(NODES, 1)
    odd = msgspec.structs.replace(
        run.workers[3], ratio=Real("nan"), status="lost", bits={}, simulated=True, case="c", drift=("a", "b")
    )
    run = msgspec.structs.replace(run, workers=(*run.workers[:3], odd, *run.workers[4:]))
    history = History(str(tmp_path))
    history.append(run, {})
    (stored,) = history.runs()
    assert stored.workers == ()
    assert repr(history.workers(stored)) == repr(run.workers)
    assert [w.name for w in history.workers(stored, {"GPU-0001-0", name(2, 7)})] == [name(1, 0), name(2, 7)]


def test_what_is_equal_is_stored_once(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, NODES, 5)
    assert len(parquet(tmp_path)) == 1
    fleet = {run.fleet for run in history.runs()}
    assert len(fleet) == 1
    assert all(path.stat().st_size < 1000 for path in (tmp_path / "nights").iterdir())


def test_few_devices_stay_in_the_record(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, 8, 1)
    assert not (tmp_path / "workers").exists()
    assert [len(run.workers) for run in history.runs()] == [64]


def test_boxes_and_fleets_are_one_history(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, NODES, 2, lambda run, w: drifted(w) if run and w.name == name(3, 0) else w)
    (alone,) = fleet_runs(1, 1)
    history.append(msgspec.structs.replace(alone, at="2026-02-01T02:00:00.000000+00:00", host="box"), {})
    rows = run_rows(history, 0)
    assert [(row.devices, row.drifted, row.drifted_devices) for row in rows] == [
        (8, (), 0), (72, (name(3, 0),), 1), (72, (), 0),
    ]  # fmt: skip
    assert [row.at[:7] for row in device_rows(history, "GPU-0000-0", 0)] == ["2026-02", "2026-01", "2026-01"]
    counted = "SELECT host, count(*) AS n, count(DISTINCT night) AS nights FROM workers"
    text = f"{counted} WHERE host IN ('box', 'gpu-0000') GROUP BY host ORDER BY host"
    assert query(history, text) == [{"host": "gpu-0000", "n": 24, "nights": 3}]
    assert query(history, "SELECT device FROM workers WHERE len(drift) > 0") == [{"device": "GPU-0003-0"}]
    assert query(history, "SELECT count(*) AS n FROM nights") == [{"n": 3}]
    with pytest.raises(UsageError, match="disabled"):
        query(history, f"SELECT * FROM read_text('{tmp_path}/nights/*')")


def test_a_url_keeps_a_fleet_too() -> None:
    url = "memory://fleet-of-a-test"
    history = fleet_history(url, NODES, 2, lambda run, w: drifted(w) if run and w.name == name(3, 0) else w)
    assert [len(history.workers(run, {name(3, 0)})) for run in History(url).runs()] == [1, 1]
    assert query(History(url), "SELECT count(*) AS n FROM workers WHERE len(drift) > 0") == [{"n": 1}]


def test_a_writer_that_was_killed_leaves_a_readable_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = fleet_history(tmp_path, NODES, 1)
    (more,) = fleet_runs(NODES + 1, 1)
    real = History._put

    def put(self: History, folder: str, name: str, raw: bytes) -> None:
        if folder == "nights":
            raise KeyboardInterrupt
        real(self, folder, name, raw)

    monkeypatch.setattr(History, "_put", put)
    with pytest.raises(KeyboardInterrupt):
        history.append(more, {})
    assert len(parquet(tmp_path)) == 2
    (tmp_path / "nights" / "20990101T000000-ffffffff.json.1234.tmp").write_bytes(b"{ cut sho")
    assert [row.devices for row in run_rows(History(str(tmp_path)), 0)] == [72]


def test_many_writers_at_once(tmp_path: Path) -> None:
    runs = list(fleet_runs(NODES, 6))
    threads = [threading.Thread(target=History(str(tmp_path)).append, args=(run, {"t": b"{}"})) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = History(str(tmp_path))
    assert [len(history.workers(run)) for run in history.runs()] == [72] * 6
    assert (len(parquet(tmp_path)), history.damage) == (1, [])
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


@pytest.mark.parametrize("damage", ["cut short", "of another run", "gone"])
def test_workers_that_cannot_be_read_are_named(tmp_path: Path, damage: str) -> None:
    history = fleet_history(tmp_path, NODES, 2, lambda run, w: drifted(w) if run else w)
    last, first = (tmp_path / "workers" / f"{run.fleet and run.fleet.file}.parquet" for run in history.runs())
    content = {"cut short": first.read_bytes()[:-9], "of another run": last.read_bytes()}
    first.unlink()
    if damage in content:
        first.write_bytes(content[damage])
    assert [row.at for row in device_rows(history, name(0, 0), 0)] == ["2026-01-02T02:00:00.000000+00:00"]
    (text,) = history.damage
    assert text.startswith("the workers of the run of 2026-01-01 02:00:00 UTC cannot be read: ")
    assert query(History(str(tmp_path)), "SELECT count(DISTINCT night) AS n FROM workers") == [{"n": 1}]


def test_without_duckdb_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet_history(tmp_path / "old", NODES, 1)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(UsageError) as error:
        fleet_history(tmp_path / "new", NODES, 1)
    assert error.value.what == "a history of more than 64 devices needs DuckDB, which is not installed"
    assert error.value.hint == "in the folder of its source: pip install '.[history]'"
    assert not (tmp_path / "new" / "nights").exists()
    assert main(["history", str(tmp_path / "old"), "--device", "GPU-0000-0"]) == 2
    assert "pip install '.[history]'" in capsys.readouterr().err
    assert main(["history", str(tmp_path / "old")]) == 0, "a list of runs needs no workers"
    fleet_history(tmp_path / "new", 8, 1)


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
    assert find_drift(history, msgspec.structs.replace(now, workers=(*now.workers, new)), {}) == ([], {})


def _name(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
