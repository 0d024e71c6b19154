"""Each command's help tells its own exit statuses, and the command has no others."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from consistency.cli import main as command_line
from consistency.cli.main import build_parser, main
from consistency.cli.parser import statuses_by_command
from consistency.extras.diagnosis.bisect import bisect
from consistency.extras.diagnosis.drill import drill
from consistency.extras.diagnosis.reproduce import folder

EXIT_STATUS = statuses_by_command(build_parser())

BAD = "2 bad usage or bad input"
VERDICT = f"0 consistent; 1 inconsistent; {BAD}; 3 incomplete (a worker was lost)"
LINES = {
    "run": VERDICT,
    "compare": VERDICT,
    "fleet": VERDICT,
    "doctor": f"0 nothing is wrong; 1 something is wrong; {BAD}; 3 incomplete (a worker was lost)",
    "capture": f"0 captured; {BAD}; 3 incomplete (a worker was lost)",
    "diff": f"0 equal; 1 different; {BAD}",
    "check-adapter": f"0 nothing is wrong with it; 1 something is; {BAD}",
    "check-merged": f"0 it holds base + adapter; 1 it does not; {BAD}; 3 a part of it could not be judged",
    "drill": f"0 every planted fault was found and named; 1 one was not; {BAD}",
    "bisect": f"0 a setting explains it, or it does not occur again; 1 no setting explains it; {BAD}",
    "reproduce": f"0 written, whether it happens on this machine or not; {BAD}",
    "status": "0 consistent; 1 inconsistent; 2 nothing was checked, no result, or bad usage; 3 incomplete, or stale",
    "show": f"0 printed, whatever the verdict is; {BAD}",
    "devices": f"0 listed; {BAD}",
    "check-text": "0 the model could have written all of it; 1 it could not, or log probabilities are not the model's; "
    f"{BAD}; 3 incomplete (a text was not judged)",
    "inputs": f"0 written; {BAD}",
    "engine": f"0 written; {BAD}",
    "history": f"0 printed, written or removed, whatever the verdicts are; {BAD}",
    "baseline": f"0 written; {BAD}",
    "explain": f"0 explained; {BAD}",
    "env": f"0 printed; {BAD}",
    "completion": f"0 printed; {BAD}",
}


def parsers(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner, one in action.choices.items():
                yield name or inner, one
                yield from parsers(one, name or inner)


def test_each_help_has_the_line_of_its_command() -> None:
    found = [(name, parser.format_help()) for name, parser in parsers(build_parser())]
    assert {name for name, _ in found} == set(EXIT_STATUS)
    for name, text in found:
        assert [line for line in text.splitlines() if line.startswith("exit status")] == [f"exit status: {LINES[name]}"]
    assert (
        f"exit status: {VERDICT}; 70 a mistake of this tool, and no verdict; 130 stopped"
        in build_parser().format_help()
    )


@pytest.mark.parametrize("name", [name for name, statuses in EXIT_STATUS.items() if 1 not in statuses])
def test_a_status_that_the_help_does_not_have_is_an_error_of_ours(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = command_line.build_parser(name)

    def parsed(_arguments: object) -> argparse.Namespace:
        parser = next(one for of, one in parsers(made) if of == name)
        return argparse.Namespace(command=lambda _: 1, parser=parser, statuses=EXIT_STATUS[name])

    monkeypatch.setattr(made, "parse_args", parsed)
    monkeypatch.setattr(command_line, "build_parser", lambda _named: made)
    assert main([name]) == 70
    told = capsys.readouterr().err
    assert re.search(f"AssertionError: consistency {name}.* has no exit status 1", told)
    assert "CONSISTENCY_TRACEBACK=1" in told
    assert "Traceback" not in told
    monkeypatch.setenv("CONSISTENCY_TRACEBACK", "1")
    assert main([name]) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError("8 GiB"), RuntimeError("can't start new thread"), OSError("disk")])
def test_what_a_host_lacks_is_no_mistake_of_ours(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(folder, "reproduce", fail)
    assert main(["reproduce", "run-1", "--out", "repro"]) == 2
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1)])
def test_drill(passed: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = SimpleNamespace(
        planted=True,
        passed=passed,
        found=passed,
        fault="f",
        case="C1",
        worker="cpu",
        expected="x",
        named="",
        message="",
    )
    monkeypatch.setattr(drill, "prepare_trials", lambda *_, **__: ())
    monkeypatch.setattr(drill, "plan_of", lambda _: None)
    monkeypatch.setattr("consistency.workflows.suite.expected", lambda _: {})
    monkeypatch.setattr(drill, "drill", lambda *_, **__: [row])
    assert main(["drill"]) == status
    assert f"{int(passed)} of 1 planted faults" in capsys.readouterr().out


@pytest.mark.parametrize(("explained", "repeats", "status"), [(("set",), True, 0), ((), False, 0), ((), True, 1)])
def test_bisect(explained: tuple[str, ...], repeats: bool, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(explained_by=explained, repeats=repeats, sentence="so it is")
    monkeypatch.setattr(bisect, "bisect", lambda *_, **__: found)
    assert main(["bisect", "run-1", "--finding", "1"]) == status


@pytest.mark.parametrize("happens", [True, False])
def test_reproduce(happens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(output="", sentence="", folder=Path("repro"), happens_here=happens, is_large=False)
    monkeypatch.setattr(folder, "reproduce", lambda *_, **__: found)
    assert main(["reproduce", "run-1", "--finding", "1", "--out", "repro"]) == 0
