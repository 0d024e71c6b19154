"""The report of a suite that ran: one finding for two cases, whose next command works, and one entry in the history."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from consistency.case.builtin import builtin_folder
from consistency.case.options import Edge
from consistency.case.suite import gather_suite
from consistency.cli.main import main
from consistency.comparison.suite import SuiteResult
from consistency.extras.operations.history.past import HistoryAndBaseline
from consistency.extras.operations.history.store import History
from consistency.workflows.suite import prepare_suite, run_suite
from tests.launch.in_this_process import in_this_process
from tests.report.printed import printed

pytestmark = pytest.mark.process

CONFIG = """
base = "builtin:llama"
devices = "cpu"
stages = "adapter"
level = "quick"

[[case]]
adapter = "adapters/*"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("suite")


@pytest.fixture(scope="module")
def ran(home: Path) -> SuiteResult:
    """Run three cases; a bit of the adapter is flipped in two of them."""
    for name in ("alice", "bob", "carol"):
        shutil.copytree(builtin_folder("llama") / "adapter", home / "adapters" / name)
    (home / "nightly.toml").write_text(CONFIG)
    options = gather_suite(home / "nightly.toml", {}, Edge.COMMAND_LINE)
    assert options is not None
    faults = {name: {"cpu": "adapter-bit-flip"} for name in ("alice", "carol")}
    plan = prepare_suite(options).with_faults(faults)
    history = History(str(home / "history"))
    with in_this_process():
        return run_suite(plan, home / "out", watch=lambda *_: None, past=HistoryAndBaseline(history=history))


@pytest.mark.slow
def test_one_cause_is_one_finding_with_a_command_that_works(
    home: Path, ran: SuiteResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(ran, folder=str(home / "out"), width=400)
    assert "INCONSISTENT   2 of 3 cases are inconsistent and 1 is consistent" in text
    assert "1  2 of 3 cases · adapter · cpu · single-bit flips in lora_B of model.layers.0.mlp.gate_proj" in text
    (command,) = {line.strip().removeprefix("next: ") for line in text.splitlines() if "next: " in line}
    program, *arguments = shlex.split(command)
    assert (program, arguments[0], Path(arguments[1]).name) == ("consistency", "reproduce", "alice")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 0
    assert "recorded: on cpu: 1 of 2048 elements differ" in capsys.readouterr().out


def test_a_suite_is_no_report_of_a_case(home: Path, ran: SuiteResult, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", str(home / "out"), "--finding", "1", "--out", str(home / "repro")]) == 2
    assert f"this is a suite: give the folder of a case, {home}/out/cases/NAME" in capsys.readouterr().err


def test_every_link_of_the_page_and_every_path_of_the_file_leads_to_a_report(home: Path, ran: SuiteResult) -> None:
    table = json.loads((home / "out" / "suite.json").read_text())
    assert [case["name"] for case in table["cases"]] == ["alice", "bob", "carol"]
    page = (home / "out" / "suite.html").read_text()
    for case in table["cases"]:
        assert (home / "out" / case["report"]).is_file()
        link = case["report"].replace(".json", ".html")
        assert f'href="{link}"' in page
        assert (home / "out" / link).is_file()


def test_the_suite_is_one_run_of_the_history(home: Path, ran: SuiteResult, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", str(home / "history")]) == 0
    text = capsys.readouterr().out
    assert "nightly (3 cases)" in text
    assert "1 run\n" in text
    (run,) = History(str(home / "history")).runs()
    assert run.cases == {"alice": "inconsistent", "bob": "consistent", "carol": "inconsistent"}
    assert {worker.case for worker in run.workers} == {"alice", "bob", "carol"}
