"""A suite as a user runs it: one set of workers, a report per case, and one for all."""

from __future__ import annotations

import dataclasses
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import consistency
from consistency.capture.folder import WorkerCapture
from consistency.capture.reader import read_capture
from consistency.case import standard
from consistency.case.builtin import builtin_folder
from consistency.case.options import Edge
from consistency.case.stages import HOST_STAGES
from consistency.case.suite import SuiteOptions, gather_suite
from consistency.comparison.suite import SuiteResult, common_findings
from consistency.errors import CaptureError, UsageError
from consistency.launch.process import WorkerProcess
from consistency.workflows import suite
from tests.conftest import Cli
from tests.launch.in_this_process import in_this_process
from tests.report.made_comparisons import comparison, worker

pytestmark = pytest.mark.slow

SUITE_FILES = ["suite-status.json", "suite.html", "suite.json", "suite.md"]

CONFIG = """
base = "builtin:llama"
devices = "cpu"
stages = "base,adapter,merged"
level = "quick"
threads = 1

[[case]]
adapter = "adapters/*"

[[case]]
name = "killed"

[[case]]
name = "in-bfloat16"
dtype = "bfloat16"
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("suite")
    for name in ("one", "two"):
        shutil.copytree(builtin_folder("llama") / "adapter", home / "adapters" / name)
    (home / "adapters" / "broken").mkdir()
    shutil.copy(home / "adapters/one/adapter_config.json", home / "adapters/broken")
    (home / "night.toml").write_text(CONFIG)
    return home / "night.toml"


def options_of(config: Path, **given: Any) -> SuiteOptions:
    found = gather_suite(config, given, Edge.COMMAND_LINE)
    assert found is not None
    return found


def test_no_case_takes_longer_than_its_suite() -> None:
    """Workers run side by side: the sum of their times exceeds that of the suite."""
    workers = (worker("cpu", "x86-64", elapsed_s=3.0), worker("cuda:0", elapsed_s=2.5))
    assert suite.slowest_s(comparison([], workers=workers)) == 3.0


@dataclasses.dataclass
class Ran:
    out: Path
    result: SuiteResult
    processes: list[list[str]]


@pytest.fixture(scope="module")
def ran(config: Path) -> Ran:
    """Run the suite once, with a case that kills its worker and one whose adapter has no weights."""
    out = config.parent / "out"
    plan = suite.prepare_suite(options_of(config)).with_faults({"killed": {"cpu": "killed"}})
    started, result = run_and_note(plan, out)
    return Ran(out=out, result=result, processes=started)


def run_and_note(plan: suite.SuitePlan, out: Path) -> tuple[list[list[str]], SuiteResult]:
    """Run a suite, and return the cases of each process that was started for it too."""
    started: list[list[str]] = []
    real = WorkerProcess.start

    def start(assignments: Any, **options: Any) -> Any:
        started.append([one.case.name for one in assignments])
        return real(assignments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerProcess, "start", start)
        result = suite.run_suite(plan, out, watch=lambda *_: None)
    return started, result


@pytest.mark.process
def test_each_case_has_its_own_verdict(ran: Ran) -> None:
    assert {case.name: case.verdict for case in ran.result.cases} == {
        "broken": "unchecked",
        "one": "consistent",
        "two": "consistent",
        "killed": "incomplete",
        "in-bfloat16": "consistent",
    }
    assert (ran.result.verdict, ran.result.exit_status) == ("incomplete", 3)
    killed = next(case for case in ran.result.cases if case.name == "killed")
    assert any("SIGKILL" in str(worker.reason) for worker in killed.workers)


@pytest.mark.process
def test_one_process_takes_all_cases_until_one_ends_it(ran: Ran) -> None:
    assert ran.processes == [["one", "two", "killed", "in-bfloat16"], ["in-bfloat16"]]


def test_a_suite_runs_as_many_cases_at_once_as_are_planned(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "cases_at_once", lambda *_: 3)
    assert suite.prepare_suite(options_of(config)).limits.cases_at_once == 3


@pytest.mark.process
@pytest.mark.parametrize("killed", [False, True])
def test_cases_side_by_side_have_the_bits_of_cases_in_turn(config: Path, ran: Ran, killed: bool) -> None:
    """Two processes share the cases, with a thread each; one that ends costs its own case alone."""
    out = config.parent / f"beside-{killed}"
    plan = suite.prepare_suite(options_of(config))
    plan = dataclasses.replace(plan, limits=dataclasses.replace(plan.limits, cases_at_once=2))
    plan = plan.with_faults({"killed": {"cpu": "killed"}} if killed else {})
    started, result = run_and_note(plan, out)
    assert started[:2] == [["one", "killed"], ["two", "in-bfloat16"]]
    assert len(started) == 2
    assert {case.name: case.verdict for case in result.cases} == {
        "broken": "unchecked", "one": "consistent", "two": "consistent", "in-bfloat16": "consistent",
        "killed": "incomplete" if killed else "consistent",
    }  # fmt: skip
    for name in ("one", "two", "in-bfloat16"):
        in_turn, beside = (worker_of(of / "cases" / name / "captures") for of in (ran.out, out))
        assert beside.info.environment["threads"] == in_turn.info.environment["threads"] == 1
        found, expected = (
            [(one.stage, one.layer, one.tensor, one.digest) for one in of.records] for of in (beside, in_turn)
        )
        assert any(digest for *_, digest in found)
        assert found == expected


def worker_of(captures: Path) -> WorkerCapture:
    """Return the one worker of the one capture."""
    (found,) = read_capture(captures).workers
    return found


@pytest.mark.process
def test_a_case_has_what_a_run_leaves_and_the_suite_its_own_files(ran: Ran) -> None:
    assert sorted(path.name for path in ran.out.iterdir()) == ["cases", *SUITE_FILES]
    assert sorted(path.name for path in (ran.out / "cases").iterdir()) == ["in-bfloat16", "killed", "one", "two"]
    for name in ("one", "killed"):
        assert sorted(path.name for path in (ran.out / "cases" / name).iterdir()) == [
            "captures", "report.html", "report.json", "report.md", "status.json",
        ]  # fmt: skip
    report = json.loads((ran.out / "cases/two/report.json").read_text())
    assert report["verdict"] == "consistent"
    assert {one["status"] for one in report["outcomes"] if one["stage"] == "base"} == {"equal"}
    (kind,) = report["environments"]
    assert kind["environment"]["base"].startswith("kept from the case before")


@pytest.mark.process
@pytest.mark.parametrize("captured_alone", [False, True])
def test_fail_fast_leaves_out_what_follows(config: Path, tmp_path: Path, captured_alone: bool) -> None:
    fault = "killed" if captured_alone else "adapter-zeros"
    plan = suite.prepare_suite(options_of(config)).with_faults({"two": {"cpu": fault}})
    with in_this_process() if not captured_alone else nullcontext():
        if captured_alone:
            found = suite.capture_suite(plan, tmp_path / "out", watch=lambda *_: None, fail_fast=True)
            errors = {name: one.what for name, one in found.items() if isinstance(one, UsageError)}
        else:
            result = suite.run_suite(plan, tmp_path / "out", watch=lambda *_: None, fail_fast=True)
            assert [case.verdict for case in result.cases] == [
                "unchecked", "consistent", "inconsistent", "unchecked", "unchecked",
            ]  # fmt: skip
            assert result.exit_status == 1
            assert common_findings(result.cases)[0].cases == ("two",)
            errors = {case.name: str(case.error) for case in result.cases if "--fail-fast" in (case.error or "")}
    assert errors == dict.fromkeys(["killed", "in-bfloat16"], "left out by --fail-fast after case two")
    assert sorted(path.name for path in (tmp_path / "out/cases").iterdir()) == ["one", "two"]


@pytest.mark.process
def test_results_in_the_way_are_not_overwritten(config: Path, ran: Ran) -> None:
    with pytest.raises(CaptureError, match="in the way"):
        suite.run_suite(suite.prepare_suite(options_of(config)), ran.out, watch=lambda *_: None)


@pytest.mark.process
def test_a_suite_of_unusable_cases_starts_no_worker(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerProcess, "start", None)
    chosen = options_of(config).chosen(["broken"])
    result = suite.run_suite(suite.prepare_suite(chosen), tmp_path / "out", watch=lambda *_: None)
    assert (result.verdict, result.exit_status) == ("unchecked", 2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == SUITE_FILES


def test_the_host_is_checked_in_the_first_case_of_a_level(config: Path) -> None:
    given = options_of(config, level="quick")
    text = [dataclasses.replace(case, stages=None) for case in given.cases if case.name != "broken"]
    text[1] = dataclasses.replace(text[1], stages=HOST_STAGES)
    plan = suite.prepare_suite(dataclasses.replace(given, cases=tuple(text)))
    found = [one.plan.case for one in plan.cases if one.plan is not None]
    assert [set(HOST_STAGES) <= set(case.stages) for case in found] == [True, True, False, False]
    assert "stage transfer (checked in case one)" in found[2].not_checked()
    assert not any("stage transfer" in text for text in found[0].not_checked())
    assert not set(HOST_STAGES) & set(found[3].stages)


def test_a_case_that_does_not_check_the_host_is_not_said_to_have_done_so(config: Path) -> None:
    given = options_of(config, level="quick").chosen(["one", "two"])
    one, two = given.cases
    cases = (dataclasses.replace(one, stages=(standard.ADAPTER,)), dataclasses.replace(two, stages=None))
    plan = suite.prepare_suite(dataclasses.replace(given, cases=cases))
    found = [case.plan.case for case in plan.cases if case.plan is not None]
    assert set(HOST_STAGES) <= set(found[1].stages)
    assert found[1].host_checked_by == ""


def test_cases_with_one_base_follow_one_another(config: Path) -> None:
    given = options_of(config).chosen(["one", "in-bfloat16", "two"])
    one, two, half = given.cases
    plan = suite.prepare_suite(dataclasses.replace(given, cases=(one, half, two)))
    assert [case.name for case in suite._in_turn(plan.cases)] == ["one", "two", "in-bfloat16"]


@pytest.mark.process
def test_without_several_cases_there_is_no_suite() -> None:
    with pytest.raises(UsageError, match="there is only one case"):
        consistency.run_suite(base="builtin:llama")


def test_the_command_line_narrows_a_suite_and_exits_by_its_verdict(cli_here: Cli, config: Path) -> None:
    done = cli_here("run", config, "--case", "broken", "--json")
    assert done.returncode == 2, done.stderr
    assert [case["name"] for case in json.loads(done.stdout)["cases"]] == ["broken"]
    done = cli_here("run", config, "--case", "nothing")
    assert done.returncode == 2
    assert "no case has such a name" in done.stderr
    done = cli_here("run", "--case", "x")
    assert "there is only one case" in done.stderr


def test_captures_of_a_suite_lie_by_case(cli_here: Cli, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "captures"
    done = cli_here("capture", config, "--case", "one,broken", "--stages", "base", "--out", out, "--json")
    assert done.returncode == 2, done.stderr
    found = json.loads(done.stdout)["cases"]
    assert found["one"]["workers"][0]["status"] == "ok"
    assert found["broken"]["error"]["where"].startswith(str(config.parent))
    assert (out / "cases/one/capture.json").exists()
    refused = cli_here("capture", config, "--out", tmp_path / "x.zip")
    assert "the captures of a suite need a folder" in refused.stderr
