"""The folder of a command: its own while it works, and never among the weights."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from consistency.capture.claim import CLAIM
from consistency.capture.whole_file import WholeFile
from consistency.errors import CaptureError
from consistency.extras.operations.history.past import HistoryAndBaseline
from consistency.extras.operations.history.store import History
from consistency.report import terminal
from consistency.report.formats import View
from consistency.workflows.comparing import compare_folders
from consistency.workflows.report_folder import output, write_reports
from consistency.workflows.suite import write_suite
from tests.comparison.made_records import moved
from tests.conftest import Cli, MakeCapture
from tests.made_weights import f32, put
from tests.report.made_suites import suite


def test_second_run_into_one_folder_is_refused_while_the_first_one_works(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with output(out, replace=False):
        for replace in (False, True):
            with pytest.raises(CaptureError, match="another process writes"), output(out, replace=replace):
                pass
        (out / "report.json").touch()
    assert [one.name for one in out.iterdir()] == ["report.json"]


def test_claim_of_a_killed_run_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / CLAIM).write_text("process 1 on another host")
    with output(tmp_path, replace=False):
        pass
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["base/run", "base", "adapter/run"])
@pytest.mark.parametrize("command", ["run", "capture", "diff"])
def test_results_are_not_written_among_the_weights(
    command: str, place: str, tmp_path: Path, llama_base: Path, llama_adapter: Path, cli_here: Cli
) -> None:
    base, adapter = (shutil.copytree(one, tmp_path / one.name) for one in (llama_base, llama_adapter))
    before = {*tmp_path.rglob("*")}
    weights = (base, adapter) if command == "diff" else ("--base", base, "--adapter", adapter, "--devices", "cpu")
    found = cli_here(command, *weights, "--out", tmp_path / place)
    assert (found.returncode, found.stdout) == (2, "")
    assert "--out is inside a folder of weights" in found.stderr
    assert {*tmp_path.rglob("*")} == before


def test_verdict_is_printed_where_files_cannot_be_written(
    tmp_path: Path, make_capture: MakeCapture, cli_here: Cli
) -> None:
    captures = [make_capture(name, {"cpu": [moved()]}) for name in "ab"]
    out, junit = tmp_path / "out", tmp_path / "run.xml"
    for place in (out / "report.html", junit):
        (place / "in the way").mkdir(parents=True)
    found = cli_here("compare", *captures, "--out", out, "--force", "--junit", junit)
    assert "warning: report.html: cannot write" in found.stdout
    assert f"cannot write\n  where:  {junit}" in found.stderr
    assert found.returncode == 0
    assert "CONSISTENT" in found.stdout
    assert {one.name for one in out.iterdir() if one.is_file()} == {"report.json", "report.md", "status.json"}


def test_files_of_an_earlier_run_do_not_stay_beside_new_ones(
    tmp_path: Path, make_capture: MakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would state another verdict; where nothing new can be written, the earlier report stays whole."""
    captures = [make_capture(name, {"cpu": [moved()]}) for name in "ab"]
    out = tmp_path / "out"
    comparison = compare_folders(captures, out)
    old = {one.name: one.stat().st_ino for one in out.iterdir()}
    write = WholeFile.write

    def failing(self: WholeFile, parts: Iterable[bytes]) -> None:
        if self.path.suffix in failures:
            raise CaptureError("cannot write", got="no space")
        write(self, parts)

    monkeypatch.setattr(WholeFile, "write", failing)
    failures = {".json", ".html", ".md"}
    write_reports(comparison, out)
    assert {one.name: one.stat().st_ino for one in out.iterdir()} == old
    failures = {".html"}
    write_reports(comparison, out)
    assert {one.name for one in out.iterdir()} == {*old} - {"report.html"}


def test_a_report_appears_when_all_of_its_files_are_written(
    tmp_path: Path, make_capture: MakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = [make_capture(name, {"cpu": [moved()]}) for name in "ab"]
    out = tmp_path / "out"
    seen: list[set[str]] = []
    write = WholeFile.write

    def watched(self: WholeFile, parts: Iterable[bytes]) -> None:
        write(self, parts)
        seen.append({one.name for one in out.iterdir() if not one.name.startswith(".")})

    monkeypatch.setattr(WholeFile, "write", watched)
    compare_folders(captures, out)
    assert seen == [set()] * len(seen)
    assert len(seen) == len([*out.iterdir()])


def test_place_of_a_comparison_is_claimed_before_its_work(tmp_path: Path, make_capture: MakeCapture) -> None:
    """Whoever comes second adds no run to a history either."""
    captures = [make_capture(name, {"cpu": [moved()]}) for name in "ab"]
    history = History(str(tmp_path / "history"))
    with output(tmp_path / "out", replace=False), pytest.raises(CaptureError, match="another process writes"):
        compare_folders(captures, tmp_path / "out", past=HistoryAndBaseline(history=history), replace=True)
    assert history.names() == []


def test_a_run_that_ends_after_its_captures_leaves_no_earlier_report(
    tmp_path: Path, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = ("run", "--devices", "cpu", "--stages", "adapter", "--out", out)
    assert cli_here(*words).returncode == 0
    created = (out / "captures" / "capture.json").read_bytes()

    def ended(*_: object, **__: object) -> None:
        raise CaptureError("as if it were killed")

    monkeypatch.setattr("consistency.workflows.pipeline.compare_captures", ended)
    assert cli_here(*words, "--force").returncode == 2
    assert (out / "captures" / "capture.json").read_bytes() != created
    assert [one.name for one in out.iterdir()] == ["captures"]


def test_suite_says_what_of_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "suite.html" / "in the way").mkdir(parents=True)
    found = write_suite(suite(), tmp_path)
    (text,) = found.unwritten
    assert text.startswith("suite.html: cannot write")
    assert f"not written: {text}"[:40] in b"".join(terminal.render(found, View())).decode()
    assert (tmp_path / "suite.md").exists()


@pytest.mark.parametrize("words", [("run",), ("run", "--dated"), ("diff", "a", "b"), ("drill",), ("doctor",)])
def test_folder_is_not_named_as_one_file(words: tuple[str, ...], tmp_path: Path, cli_here: Cli) -> None:
    for name in ("a", "b"):
        put(tmp_path / name, {"x.w": f32(1)})
    found = cli_here(*words, "--out", "out.zip", cwd=tmp_path)
    assert (found.returncode, "a folder, not one file" in found.stderr) == (2, True)
    assert {one.name for one in tmp_path.iterdir()} == {"a", "b"}


def test_redacted_report_is_one_file_where_that_is_its_name(
    tmp_path: Path, make_capture: MakeCapture, cli_here: Cli
) -> None:
    captures = [make_capture(name, {"cpu": [moved()]}) for name in "ab"]
    cli_here("compare", *captures, "--out", tmp_path / "out")
    show = ("show", tmp_path / "out", "--redact", "--out", tmp_path / "public.zip")
    assert cli_here(*show).returncode == 0
    with zipfile.ZipFile(tmp_path / "public.zip") as archive:
        assert sorted(archive.namelist()) == [f"report.{end}" for end in ("html", "json", "md")]
    assert cli_here(*show).returncode == 2
    assert cli_here(*show, "--force").returncode == 0
