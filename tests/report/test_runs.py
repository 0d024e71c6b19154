"""Folders by date: every run has its own, and the last one is found."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from consistency.capture.claim import CLAIM, claimed
from consistency.errors import CaptureError
from consistency.report import runs
from consistency.report.runs import LATEST, REPORT, dated, latest_run


def leave(out: Path, name: str = "report.json") -> Path:
    """Do what a run does; return its folder."""
    with dated(out) as folder:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def stop(out: Path, name: str) -> Path:
    """Do what a run does that is stopped when it has written a file; return its folder."""
    made = []

    def run() -> None:
        with dated(out) as folder:
            made.append(folder)
            (folder / name).parent.mkdir(parents=True)
            (folder / name).touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    return made[0]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Give the runs a clock that stands at 2026-11-22 02:00 until a test moves it."""
    now = [1795312800.0]
    clock = type(
        "Clock", (), {"strftime": time.strftime, "gmtime": lambda: time.gmtime(now[0]), "time": lambda: now[0]}
    )
    monkeypatch.setattr(runs, "time", clock)
    return now


def test_a_run_is_named_by_its_time_and_latest_leads_to_it(tmp_path: Path, clock: list[float]) -> None:
    first = leave(tmp_path / "out")
    assert first.name == "2026-11-22T02-00-00Z"
    assert latest_run(tmp_path / "out") == first
    clock[0] += 24 * 3600
    second = leave(tmp_path / "out")
    assert second.name == "2026-11-23T02-00-00Z"
    assert (tmp_path / "out" / LATEST).resolve() == second.resolve()
    assert latest_run(tmp_path / "out") == second
    assert {path.name for path in (tmp_path / "out").iterdir()} == {first.name, second.name, LATEST}


def test_two_runs_of_one_second_stay_apart(tmp_path: Path) -> None:
    assert [leave(tmp_path).name for _ in range(3)] == [
        f"2026-11-22T02-00-00Z{end}" for end in ("", "-2", "-3")
    ]  # fmt: skip
    assert latest_run(tmp_path).name.endswith("-3")


def test_failed_work_leaves_nothing_and_the_run_before_stays_the_latest(tmp_path: Path, clock: list[float]) -> None:
    before = leave(tmp_path)
    clock[0] += 60
    folder = stop(tmp_path, "captures/capture.json")
    assert not folder.exists()
    assert latest_run(tmp_path) == before


def test_a_suite_that_was_stopped_keeps_its_complete_cases(tmp_path: Path) -> None:
    folder = stop(tmp_path, "cases/a/report.json")
    assert (folder / "cases" / "a" / "report.json").exists()
    assert latest_run(tmp_path) == tmp_path, "it has not ended"


def test_without_links_the_newest_name_with_a_report_is_the_latest(tmp_path: Path, clock: list[float]) -> None:
    (tmp_path / LATEST).mkdir()  # a link cannot take its place
    leave(tmp_path)
    clock[0] += 60
    second = leave(tmp_path, "suite.json")
    (tmp_path / "2026-11-24T02-00-00Z").mkdir()
    assert latest_run(tmp_path) == second


def test_a_link_that_leads_nowhere_is_passed_over(tmp_path: Path) -> None:
    kept = leave(tmp_path)
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).symlink_to("gone")
    assert latest_run(tmp_path) == kept


def test_the_folder_itself_is_a_run_and_the_newer_one_counts(tmp_path: Path) -> None:
    assert latest_run(tmp_path) == tmp_path
    inner = leave(tmp_path)
    (tmp_path / "report.json").touch()
    for path, when in ((inner / "report.json", 200), (tmp_path / "report.json", 100)):
        os.utime(path, (when, when))
    assert latest_run(tmp_path) == inner
    os.utime(tmp_path / "report.json", (300, 300))
    assert latest_run(tmp_path) == tmp_path


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CaptureError, match="cannot make the output folder"), dated(tmp_path / "file"):
        pass


def test_what_a_killed_run_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    killed, suite, living = (tmp_path / f"2026-11-2{day}T02-00-00Z" for day in (1, 2, 3))
    for folder in (killed / ".captures.partial", suite / "cases/b/.captures.partial", suite / "cases/a", living):
        folder.mkdir(parents=True)
    for folder in (killed, suite):
        (folder / CLAIM).touch()
    (suite / "cases/a" / REPORT).touch()
    with claimed(living / CLAIM), dated(tmp_path) as now:
        assert {*tmp_path.iterdir()} == {suite, living, now}
        assert (living / CLAIM).exists()
    assert {one.relative_to(suite).as_posix() for one in suite.rglob("*") if one.is_file()} == {f"cases/a/{REPORT}"}
    assert not (suite / "cases/b/.captures.partial").exists()
