"""What a report prints to be typed next is typed, exactly as it stands, where the user stands."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from consistency.case.builtin import builtin_folder
from consistency.comparison.result import Comparison
from consistency.report.findings import COMMANDS, findings_of, is_command
from consistency.workflows.saved_report import read_comparison
from tests.conftest import Cli
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
        for line in commands(read_comparison(tmp_path / "drill" / fault)[0], f"drill/{fault}"):
            shutil.rmtree(tmp_path / "repro", ignore_errors=True)
            done = cli(*shlex.split(line)[1:], cwd=tmp_path)
            assert done.returncode == 0, (line, done.stdout, done.stderr)  # the fault is not planted again
            typed += 1
    assert typed > len(FAULTS)
