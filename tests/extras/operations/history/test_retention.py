"""What is removed of a history, and what never is."""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from consistency.cli.main import main
from consistency.errors import UsageError
from consistency.extras.operations.history.records import WorkerRecord
from consistency.extras.operations.history.retention import remove_old
from consistency.extras.operations.history.store import History
from tests.extras.operations.history.made_fleets import at, drifted, fleet_history, fleet_runs, name


def age(folder: Path) -> None:
    """Make every file two days old."""
    for path in folder.rglob("*.*"):
        os.utime(path, (time.time() - 2 * 86400,) * 2)


def times(folder: Path) -> list[str]:
    return [run.at for run in History(str(folder)).runs()]


def test_the_last_runs_of_each_host_and_case_stay(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, 1, 5)
    (other,) = fleet_runs(1, 1, case="other")
    history.append(other, {})
    found = remove_old(history, keep_runs=2)
    assert [run.at for run in found.runs] == [at(0), at(1), at(2)]
    assert times(tmp_path) == [at(4), at(3), at(0)]


def test_runs_of_the_last_days_stay(tmp_path: Path) -> None:
    history = History(str(tmp_path))
    now = datetime.datetime.now(datetime.UTC)
    for days in (9, 8, 1):
        (run,) = fleet_runs(1, 1)
        stamp = (now - datetime.timedelta(days=days)).isoformat(timespec="microseconds")
        history.append(msgspec.structs.replace(run, at=stamp), {})
    assert len(remove_old(history, keep_days=8.5, dry_run=True).runs) == 1
    assert len(times(tmp_path)) == 3, "nothing was removed"
    assert len(remove_old(history, keep_days=0.5, keep_runs=2).runs) == 1
    assert len(times(tmp_path)) == 2, "a run that one of both keeps"


def test_the_run_that_a_drifting_device_is_compared_with_stays(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, 1, 8, lambda run, w: drifted(w) if run >= 3 and w.name == name(0, 5) else w)
    found = remove_old(history, keep_runs=2)
    assert [run.at for run in found.kept_for_drift] == [at(2)]
    assert times(tmp_path) == [at(7), at(6), at(2)]


def test_files_that_no_run_names_go_a_day_later(tmp_path: Path) -> None:
    first = "1" * 64

    def happens(run: int, worker: WorkerRecord) -> WorkerRecord | None:
        return worker if run else msgspec.structs.replace(worker, table=first) if worker.host < "gpu-0004" else None

    history = fleet_history(tmp_path, 9, 3, happens)
    history.put_tables({"0" * 64: b"{}", "1" * 64: b"{}"})
    (tmp_path / "tables" / "x.json.1234.tmp").write_bytes(b"")
    assert remove_old(history, keep_runs=2).files == 0, "whose run may not be written yet"
    age(tmp_path)
    assert remove_old(history, keep_runs=2).files == 2
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["0" * 64 + ".json"]
    assert [len(run.workers) for run in history.runs()] == [72, 72]


def test_it_may_be_stopped_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = fleet_history(tmp_path, 1, 5)
    real, removed = History.remove, 0

    def remove(self: History, place: str) -> None:
        nonlocal removed
        if removed == 2:
            raise KeyboardInterrupt
        removed += 1
        real(self, place)

    monkeypatch.setattr(History, "remove", remove)
    with pytest.raises(KeyboardInterrupt):
        remove_old(history, keep_runs=1)
    assert times(tmp_path) == [at(4), at(3), at(2)]


def test_a_damaged_history_keeps_everything(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, 1, 3)
    (tmp_path / "runs" / "20250101T000000-ffffffff.json").write_bytes(b"{ cut sho")
    with pytest.raises(UsageError, match="damaged history"):
        remove_old(history, keep_runs=1)
    assert len(times(tmp_path)) == 3


def test_the_command_says_what_it_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet_history(tmp_path, 1, 8, lambda run, w: drifted(w) if run >= 3 else w)
    text = (
        " 5 runs, 2026-01-01 to 2026-01-06, and 0 files that no run names\n"
        "kept: the run of 2026-01-03 02:00:00 UTC, with which a device that drifts is compared\n3 runs left\n"
    )
    assert main(["history", str(tmp_path), "--keep-runs", "2", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would remove{text}"
    assert main(["history", str(tmp_path), "--keep-runs", "2"]) == 0
    assert capsys.readouterr().out == f"removed{text}"
    assert main(["history", str(tmp_path), "--keep-runs", "0"]) == 2
    assert main(["history", str(tmp_path), "--dry-run"]) == 2


@pytest.mark.parametrize("at", ["yesterday", "", "0001-01-01T00:00:00+14:00"])
def test_a_run_without_a_time_is_left_out(at: str, tmp_path: Path) -> None:
    history = fleet_history(tmp_path, 1, 2)
    (first, _) = sorted((tmp_path / "runs").iterdir())
    first.write_text(json.dumps({**json.loads(first.read_text()), "at": at}))
    assert len(list(history.runs())) == 1
    assert history.damage == [f"{first.name}: at is no time: {at!r}"]
    with pytest.raises(UsageError, match="no run is removed from a damaged history"):
        remove_old(History(str(tmp_path)), keep_days=1)


def test_a_time_without_a_zone_is_utc(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, 1, 2)
    (first, _) = sorted((tmp_path / "runs").iterdir())
    first.write_text(json.dumps({**json.loads(first.read_text()), "at": "2026-01-01T00:00:00"}))
    (_, run) = history.runs()
    assert run.time.isoformat() == "2026-01-01T00:00:00+00:00"
    page = tmp_path / "page.html"
    assert main(["history", str(tmp_path), "--html", str(page)]) == 0
    assert page.exists()
    assert len(remove_old(history, keep_days=1).runs) == 2
