"""The folder of a command: its own while it works, and never among the weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from consistency.capture.claim import CLAIM
from consistency.errors import CaptureError
from consistency.workflows.report_folder import output
from tests.conftest import Cli


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


@pytest.mark.parametrize("place", ["base/run", "base", "adapter/run.zip"])
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
