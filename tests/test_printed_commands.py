"""What a report prints to be typed next is typed, exactly as it stands, where the user stands."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from consistency.case.builtin import builtin_folder
from consistency.cli.main import build_parser
from consistency.comparison.result import Comparison
from consistency.report.findings import COMMANDS, findings_of, is_command
from consistency.workflows.report_folder import read_comparison
from tests.conftest import Cli
from tests.golden.executed import PRINTED
from tests.golden.rendered import FILES
from tests.report.made_comparisons import faulty, four_architectures, hostile

FAULTS = ("adapter-zeros", "adapter-wrong-scaling", "base-bit-flip", "merge-off", "optimizer-off", "transfer-zeros")


def commands(found: Comparison, folder: str) -> Iterator[str]:
    """Yield each command that a report in a folder prints."""
    for finding in findings_of(found, folder):
        for text in (*finding.detail, finding.next or "" if finding.severity != "note" else ""):
            line = text.removeprefix(next((one for one in COMMANDS if text.startswith(one)), ""))
            if is_command(line):
                yield line


@pytest.mark.parametrize("made", [faulty, hostile, four_architectures])
def test_no_printed_command_has_a_word_to_be_filled_in(made: object) -> None:
    assert callable(made)
    for line in commands(made(), "out"):
        words = shlex.split(line)
        assert not {"SOURCE", "DIR", "before"} & {word.rstrip(",") for word in words}, line


@pytest.mark.parametrize("page", sorted(FILES.glob("*.text.txt")), ids=lambda page: page.name)
def test_commands_of_golden_reports_are_understood(page: Path) -> None:
    """Their folders do not exist, so they are parsed: each names a command, and options that it has."""
    for line in PRINTED.findall(page.read_text(encoding="utf-8")):
        words = shlex.split(line)[1:]
        assert build_parser(words[0]).parse_args(words).command is not None


def strangers(found: Comparison) -> Iterator[str]:
    """Yield the lines of evidence whose tensor is none of the finding's own."""
    every = {tensor.name.partition("::")[2] for tensor in found.tensors}
    for finding, shown in zip(found.findings, findings_of(found), strict=True):
        led_to = {name for consequence in finding.consequences for name in consequence.tensors}
        own = {name.partition("::")[2] for name in finding.tensors if name not in led_to}
        for line in shown.detail:
            first = line.partition("; worst ")[2] or line
            named = max((name for name in every if first.startswith(name)), key=len, default=None)
            if named is not None and named not in own:
                yield f"{finding.message}: {line}"


def test_a_tensor_of_another_finding_is_a_stranger() -> None:
    found = faulty()
    assert not list(strangers(found))
    first = found.findings[0]
    own = {name.partition("::")[2] for name in first.tensors}
    other = next(name for tensor in found.tensors if (name := tensor.name.partition("::")[2]) not in own)
    for line in (f"{other}[0, 1] · got 1", f"2× float64 in 3 layers; worst {other}: off by 1"):
        wrong = msgspec.structs.replace(first, detail=(line,))
        assert len(list(strangers(msgspec.structs.replace(found, findings=(wrong,))))) == 1


@pytest.mark.slow
@pytest.mark.process
def test_every_printed_command_runs_as_pasted(cli: Cli, tmp_path: Path) -> None:
    """Of a case in folders of its own: what a bisection was to be allowed was missing, and no tensor was stored."""
    for name in ("base", "adapter"):
        shutil.copytree(builtin_folder("llama") / name, tmp_path / name)
    case = ("--base", "base", "--adapter", "adapter", "--devices", "cpu,cpu@baseline")
    chosen = [word for fault in FAULTS for word in ("--only", fault)]
    drill = cli("drill", *case, *chosen, "--out", "drill", cwd=tmp_path)
    assert drill.returncode == 0, drill.stderr
    typed = 0
    for fault in FAULTS:
        found = read_comparison(tmp_path / "drill" / fault)[0]
        assert not list(strangers(found))
        for line in commands(found, f"drill/{fault}"):
            shutil.rmtree(tmp_path / "repro", ignore_errors=True)
            done = cli(*shlex.split(line)[1:], cwd=tmp_path)
            assert done.returncode == 0, (line, done.stdout, done.stderr)  # the fault is not planted again
            typed += 1
    assert typed > len(FAULTS)
