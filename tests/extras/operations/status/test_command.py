"""`consistency status`: exit statuses, files, and no heavy import."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from consistency.capture.json_codec import encode_json
from consistency.cli.main import build_parser, main
from consistency.comparison.result import Comparison
from tests.extras.operations.status.made_statuses import status
from tests.report.made_comparisons import comparison, faulty
from tests.report.made_suites import good, lost


def leave(folder: Path, found: Comparison, hours: float = 1.0) -> str:
    """Leave a result of some hours ago; return its folder."""
    now = datetime.datetime.now(datetime.UTC)  # not when this module was imported: a whole run of the tests takes long
    (folder / "report.json").write_text("{}")
    ended = now - datetime.timedelta(hours=hours)
    (folder / "status.json").write_bytes(encode_json(status(found, created=ended)))
    return str(folder)


STATUSES = {  # text, json and prometheus; nagios
    "consistent": (good(), 1.0, (0, 0)),
    "inconsistent": (faulty(), 1.0, (1, 2)),
    "incomplete": (lost(), 1.0, (3, 2)),
    "stale": (good(), 30.0, (3, 3)),
}


@pytest.mark.parametrize(("found", "hours", "expected"), STATUSES.values(), ids=STATUSES)
def test_exit_statuses(
    found: Comparison, hours: float, expected: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, nagios = expected
    leave(tmp_path, found, hours)
    for form, wanted in {"text": run, "json": run, "prometheus": run, "nagios": nagios}.items():
        assert main(["status", str(tmp_path), "--format", form, "--max-age", "1d2h"]) == wanted, form
        lines = capsys.readouterr().out.splitlines()
        if form in ("text", "nagios"):
            assert len(lines) == 1


@pytest.mark.parametrize("wrong", [["gone"], [".", "--max-age", "soon"]])
def test_without_a_result_each_caller_reads_that_it_is_unknown(
    wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for form, wanted, head in (
        ("text", 2, "UNKNOWN "), ("nagios", 3, "CONSISTENCY UNKNOWN - "),
        ("json", 2, '{\n "state": "UNKNOWN"'),
    ):  # fmt: skip
        assert main(["status", *wrong, "--format", form]) == wanted
        said = capsys.readouterr().out
        assert said.startswith(head)
        assert form == "json" or wrong[-1] != "soon" or "wanted 90s, 10m, 2h" in said
    assert main(["status", *wrong, "--format", "prometheus", "--out", "x.prom"]) == 2
    assert not (tmp_path / "x.prom").exists()


def test_a_file_of_metrics_is_replaced_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = leave(tmp_path, comparison([]))
    target = tmp_path / "textfile" / "consistency.prom"
    target.parent.mkdir()
    target.write_text("earlier")
    before = target.stat().st_ino
    assert main(["status", where, "--format", "prometheus", "--out", str(target)]) == 0
    assert target.read_text().startswith("# HELP consistency_verdict ")
    assert target.read_text().endswith("\n")
    assert target.stat().st_ino != before, "it was renamed into place, not written in place"
    assert [path.name for path in target.parent.iterdir()] == ["consistency.prom"]
    assert capsys.readouterr().out == ""


def test_json_says_how_old_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", leave(tmp_path, faulty(), 5.0), "--format", "json", "--max-age", "4h"]) == 3
    table = json.loads(capsys.readouterr().out)
    assert (table["verdict"], table["stale"], table["state"]) == ("inconsistent", True, "UNKNOWN")
    assert 5 * 3600 <= table["age_s"] < 5 * 3600 + 600


def test_a_command_that_is_named_is_the_only_one_that_is_built() -> None:
    help_of_all = build_parser().format_help()
    alone = build_parser("status").format_help()
    assert "bisect" in help_of_all
    assert "bisect" not in alone
    assert build_parser("frobnicate").format_help() == help_of_all
