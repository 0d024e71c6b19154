"""Folders of two suites, compared case by case: captures made by hand, in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from consistency.capture.records import TensorRecord
from consistency.case.suite import folder_name
from consistency.cli.main import main
from consistency.comparison.suite import CaseResult, SuiteResult
from consistency.errors import CaptureError, UsageError
from consistency.extras.operations.history.baseline import accept, read_baseline
from consistency.extras.operations.history.past import HistoryAndBaseline
from consistency.extras.operations.history.store import History
from consistency.workflows.comparing import are_suites, compare_folders, compare_suites
from tests.comparison.made_records import computed, moved
from tests.conftest import MakeCapture

RIGHT, WRONG = [moved(), computed()], [moved("other"), computed()]


class Night:
    """A suite's folder: `captures` as `run` leaves them, or directly as `capture` does, and `suite.json`."""

    def __init__(self, home: Path, make_capture: MakeCapture, *, below: str = "captures") -> None:
        self.folder = home
        self._make = make_capture
        self._below = below
        self._listed: list[dict[str, object]] = []

    def case(self, name: str, records: Sequence[TensorRecord] = RIGHT) -> Night:
        place = self.folder / "cases" / folder_name(name) / self._below
        self._make(str(place), {"cpu": records}, case={"name": name})
        self._listed.append({"name": name, "verdict": "consistent"})
        return self

    def unusable(self, name: str, error: str) -> Night:
        self._listed.append({"name": name, "error": error})
        return self

    def listed(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "suite.json").write_text(json.dumps({"cases": self._listed}))
        return self.folder


def by_name(suite: SuiteResult) -> dict[str, CaseResult]:
    return {case.name: case for case in suite.cases}


@pytest.fixture
def nights(tmp_path: Path, make_capture: MakeCapture) -> list[Path]:
    first = Night(tmp_path / "first", make_capture).case("zeta").case("a/b").case("alone")
    second = Night(tmp_path / "second", make_capture).case("a/b", WRONG).case("zeta").unusable("bad", "no config")
    second.case("new").unusable("alone", "its adapter is gone\n  where: x")
    return [first.unusable("bad", "no config\n  x").listed(), second.listed()]


def test_cases_of_one_name_are_compared_like_two_captures(nights: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    suite = compare_suites(nights, out)
    assert [case.name for case in suite.cases] == ["zeta", "a/b", "alone", "bad", "new"], "the first one's order"
    cases = by_name(suite)
    assert [cases[name].verdict for name in ("zeta", "a/b")] == ["consistent", "inconsistent"]
    assert [worker.name for worker in cases["zeta"].workers] == ["first:cpu", "second:cpu"], "named by the suites"
    assert (suite.name, suite.verdict, suite.exit_status) == ("first, second", "inconsistent", 1)
    assert {"cases", "suite.html", "suite.json", "suite.md"} <= {path.name for path in out.iterdir()}
    assert sorted(path.name for path in (out / "cases").iterdir()) == ["a-b", "zeta"]
    report = json.loads((out / "cases/a-b/report.json").read_text())
    assert report["verdict"] == "inconsistent"
    assert report["captures"] == [str(night / "cases/a-b") for night in nights], "what a reproducer is made from"
    assert json.loads((out / "suite.json").read_text())["cases"][0]["report"] == "cases/zeta/report.json"


def test_what_one_side_alone_has_is_unchecked_with_the_reason(nights: list[Path]) -> None:
    cases = by_name(compare_suites(nights, None))
    assert [cases[name].verdict for name in ("alone", "bad", "new")] == ["unchecked"] * 3
    assert cases["alone"].headline == f"only {nights[0]} has a capture of this case"
    assert f"{nights[1]}: its adapter is gone" in str(cases["alone"].error)
    assert f"{nights[0]}: no such case" in str(cases["new"].error)
    assert cases["bad"].headline == "no folder has a capture of this case"


def test_nothing_but_missing_cases_is_no_success(tmp_path: Path, make_capture: MakeCapture) -> None:
    folders = [Night(tmp_path / name, make_capture).case("same").listed() for name in "ab"]
    assert compare_suites(folders, None).exit_status == 0
    Night(tmp_path / "b", make_capture).case("more")
    assert compare_suites(folders, None).exit_status == 2


def test_a_cause_in_many_cases_is_one_finding(tmp_path: Path, make_capture: MakeCapture) -> None:
    names = ("one", "two", "three")
    for night, records in (("a", RIGHT), ("b", WRONG)):
        for name in names:
            Night(tmp_path / night, make_capture).case(name, records)
    suite = compare_suites([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    found = json.loads((tmp_path / "out/suite.json").read_text())["findings"][0]
    assert (sorted(found["cases"]), found["severity"]) == (sorted(names), "error")
    assert found["message"].startswith("3 of 3 cases · ")
    assert suite.exit_status == 1


def test_captures_without_a_list_have_their_own_names(tmp_path: Path, make_capture: MakeCapture) -> None:
    for name in ("a", "b"):
        Night(tmp_path / name, make_capture, below="").case("x/y")
    (case,) = compare_suites([tmp_path / "a", tmp_path / "b"], None).cases
    assert (case.name, case.folder, case.verdict) == ("x/y", "cases/x-y", "consistent")


def test_of_three_folders_one_may_lack_a_case_and_that_is_said(tmp_path: Path, make_capture: MakeCapture) -> None:
    for name in ("a", "b", "c"):
        Night(tmp_path / name, make_capture).case("everywhere")
        if name != "c":
            Night(tmp_path / name, make_capture).case("elsewhere")
    suite = compare_suites([tmp_path / name for name in "abc"], None)
    assert suite.verdict == "consistent"
    assert f"case elsewhere in {tmp_path / 'c'}, without a capture of it" in suite.not_checked


def test_a_damaged_capture_costs_its_case_alone(nights: list[Path]) -> None:
    (nights[1] / "cases/zeta/captures/capture.json").write_text("{")
    cases = by_name(compare_suites(nights, None))
    assert (cases["zeta"].verdict, cases["a/b"].verdict) == ("incomplete", "inconsistent")
    assert any("second/cases/zeta: left out" in finding.message for finding in cases["zeta"].findings)


def test_a_list_that_is_damaged_is_refused(nights: list[Path]) -> None:
    (nights[1] / "suite.json").write_text("[1")
    with pytest.raises(CaptureError, match=r"suite\.json is damaged"):
        compare_suites(nights, None)


def test_a_list_from_a_stranger_names_no_other_folder(nights: list[Path], tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    text = json.dumps({"cases": [{"name": "../../outside", "folder": "../outside", "error": "x"}]})
    (nights[1] / "suite.json").write_text(text)
    suite = compare_suites(nights, tmp_path / "out")
    assert all(case.folder.startswith("cases/") and ".." not in case.folder.split("/") for case in suite.cases)
    assert list((tmp_path / "outside").iterdir()) == []


def test_what_is_compared_is_never_replaced(nights: list[Path], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="--out is one of the folders"):
        compare_suites(nights, nights[0], replace=True)
    inner = tmp_path / "cases" / "first"
    inner.parent.mkdir()
    nights[0].rename(inner)
    with pytest.raises(CaptureError, match="--out holds a folder that is compared"):
        compare_suites([inner, nights[1]], tmp_path, replace=True)
    assert (inner / "cases/zeta/captures/capture.json").exists()


def test_two_cases_of_one_suite_are_named_by_their_own_folders(nights: list[Path]) -> None:
    found = compare_folders([nights[0] / "cases" / name for name in ("zeta", "a-b")], None)
    assert [worker.name for worker in found.workers] == ["zeta:cpu", "a-b:cpu"]


def test_an_accepted_finding_is_a_note(nights: list[Path], tmp_path: Path) -> None:
    single = compare_folders([night / "cases/a-b" for night in nights], None)
    accept(tmp_path / "baseline.json", single.findings, single.workers, reason="an older adapter, on purpose")
    baseline = read_baseline(tmp_path / "baseline.json")
    assert (
        by_name(compare_suites(nights, None, past=HistoryAndBaseline(baseline=baseline)))["a/b"].verdict == "consistent"
    )


def test_a_comparison_is_an_entry_of_a_history(nights: list[Path], tmp_path: Path) -> None:
    """That of suites has all cases that were compared, and a single one is compared with them."""
    url = str(tmp_path / "history")
    suite = compare_suites(nights, tmp_path / "out", past=HistoryAndBaseline(history=History(url)))
    (run,) = History(url).runs()
    assert (run.verdict, run.report) == (suite.verdict, str(tmp_path / "out"))
    assert [(worker.case, worker.name) for worker in run.workers] == [
        ("zeta", "first:cpu"), ("zeta", "second:cpu"), ("a/b", "first:cpu"), ("a/b", "second:cpu"),
    ]  # fmt: skip
    folders = [str(night / "cases" / "zeta") for night in nights]
    assert main(["compare", *folders, "--history", url]) == 0
    assert len(History(url).names()) == 2


def test_suites_and_single_captures_are_told_apart(nights: list[Path], make_capture: MakeCapture) -> None:
    single = make_capture("single", {"cpu": RIGHT})
    assert are_suites(nights)
    assert not are_suites([single, str(single)])
    assert not are_suites(["s3://bucket/night", "host-a.zip", "nowhere"])
    with pytest.raises(UsageError, match="a suite cannot be compared with a single capture") as found:
        are_suites([nights[0], single])
    assert found.value.hint is not None
    assert "first/cases/NAME" in found.value.hint


def test_the_command_line_prints_a_suite_and_exits_by_its_verdict(
    nights: list[Path], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["compare", *map(str, nights), "--json"]) == 1
    table = json.loads(capsysbinary.readouterr().out)
    assert table["schema"] == "consistency.suite/1"
    assert table["counts"] == {"inconsistent": 1, "unchecked": 3, "consistent": 1}
