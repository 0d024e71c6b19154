"""Which result is the last one, and which of its files is read."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import msgspec
import pytest

from consistency.capture.json_codec import encode_json
from consistency.errors import UsageError
from consistency.extras.operations.status import make
from consistency.extras.operations.status.reading import read_status
from consistency.report import json as report_json
from consistency.report.formats import View
from consistency.report.runs import dated, telling_refusal
from tests.extras.operations.status.made_statuses import status
from tests.report.made_comparisons import comparison, faulty
from tests.report.made_suites import good, suite


def leave(folder: Path, *, case: str = "llama", small: bool = True) -> Path:
    found = comparison([], case=case)
    (folder / "report.json").write_bytes(b"".join(report_json.render(found, View())))
    if small:
        (folder / "status.json").write_bytes(encode_json(status(found)))
    return folder


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it a failure to read the large file."""
    monkeypatch.setattr(make, "of_file", lambda _: pytest.fail("the report was read"))


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("name", [".", "report.json", "status.json"])
def test_the_small_file_is_read_alone(tmp_path: Path, name: str) -> None:
    assert read_status(leave(tmp_path) / name) == status(comparison([]))


@pytest.mark.usefixtures("no_report")
def test_of_dated_runs_the_latest_is_read(tmp_path: Path) -> None:
    for case in ("one", "two"):
        with dated(tmp_path) as folder:
            leave(folder, case=case)
    assert read_status(tmp_path).case == "two"


def test_a_run_that_had_no_result_is_told_until_one_has(tmp_path: Path) -> None:
    """A model's folder moved, and the status was that of the night before: consistent."""
    with pytest.raises(UsageError), telling_refusal(tmp_path):
        raise UsageError("no such folder", where="base")
    with pytest.raises(UsageError, match="no result at"):  # there never was a run: nothing is left behind
        read_status(tmp_path)
    with dated(tmp_path) as folder:
        leave(folder)
    with pytest.raises(UsageError), telling_refusal(tmp_path):
        raise UsageError("no such folder", where="base")
    with pytest.raises(UsageError, match="the last run has no result: no such folder"):
        read_status(tmp_path)
    with telling_refusal(tmp_path):
        pass
    assert read_status(tmp_path).verdict == "consistent"


def test_a_report_that_is_newer_counts(tmp_path: Path) -> None:
    """A run that was killed between the two files leaves the status of the run before."""
    (tmp_path / "status.json").write_bytes(encode_json(status(good())))
    (tmp_path / "report.json").write_bytes(b"".join(report_json.render(faulty(), View())))
    os.utime(tmp_path / "status.json", (100, 100))
    assert read_status(tmp_path).verdict == "inconsistent"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "consistency.status/2"}', "\xff"])
def test_a_small_file_that_cannot_be_read_is_passed_over(tmp_path: Path, text: str) -> None:
    leave(tmp_path)
    (tmp_path / "status.json").write_text(text, encoding="latin-1")
    assert read_status(tmp_path).verdict == "consistent"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("created", "2026-01-01T00:00:00"), ("created", "yesterday"), ("verdict", "fine"), ("exit_status", 256),
        ("verdict", "inconsistent"), ("cases", {"a": "fine"}),
    ],
)  # fmt: skip
def test_a_small_file_that_contradicts_itself_is_passed_over(tmp_path: Path, field: str, value: object) -> None:
    leave(tmp_path)
    small = tmp_path / "status.json"
    small.write_text(json.dumps({**json.loads(small.read_text()), field: value}))
    found = read_status(tmp_path)
    assert (found.verdict, found.exit_status) == ("consistent", 0)
    assert found.created.tzinfo is not None


@pytest.mark.parametrize("created", ["yesterday", "2026-01-01T00:00:00", "0001-01-01T00:00:00+14:00"])
def test_a_report_without_a_time_zone(tmp_path: Path, created: str) -> None:
    """It counts as UTC; what is no time at all is that of the file."""
    leave(tmp_path, small=False)
    report = tmp_path / "report.json"
    report.write_text(json.dumps({**json.loads(report.read_text()), "created": created}))
    night = tmp_path / "night"
    night.mkdir()
    (night / "suite.json").write_bytes(encode_json(msgspec.structs.replace(suite(), created=created, elapsed_s=1.0)))
    for folder in (tmp_path, night):
        made = read_status(folder).created
        assert made.utcoffset() == datetime.timedelta()
        assert (made.isoformat() == "2026-01-01T00:00:00+00:00") == (created == "2026-01-01T00:00:00")


def test_a_report_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(UsageError, match="not a report"):
        read_status(tmp_path)


@pytest.mark.parametrize("name", [".", "gone", "gone/report.json"])
def test_no_result(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no result at"):
        read_status(tmp_path / name)
