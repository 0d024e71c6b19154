"""A rank that was killed, stopped, or hangs is named by the others; a slow one is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extras.watching.standing_rank import WRONG_RANK, WRONG_STEP
from tests.launch.warm import ROOT

pytestmark = pytest.mark.process

WORLD = 3


def trained(folder: Path, fault: str, on_finding: str) -> list[tuple[int, str, str]]:
    """Return status, output and errors of each rank; one that stands still is ended after the others."""
    program = [sys.executable, "-P", "-m", "tests.extras.watching.standing_rank", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # an installed package has no tests
    ranks = [
        subprocess.Popen(
            [*program, str(rank), str(WORLD), fault, on_finding],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(WORLD)
    ]
    try:
        ends = {}
        for rank in [*(rank for rank in range(WORLD) if rank != WRONG_RANK), WRONG_RANK]:
            if rank == WRONG_RANK and fault != "slow_step":
                ranks[rank].kill()
            output, errors = ranks[rank].communicate(timeout=100)
            ends[rank] = ranks[rank].returncode, output, errors
    finally:
        for process in ranks:
            process.kill()
    return [ends[rank] for rank in range(WORLD)]


def said_by_watch(errors: str) -> list[str]:
    """Return what the watch has said, be it within a line of torch's own."""
    return re.findall(r"consistency\.watch: .*", errors)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param("stopped", "gives no sign of life: its process is gone or stopped", marks=pytest.mark.slow),
        pytest.param(
            "late_speaker",
            f"stands before the forward pass of step {WRONG_STEP} (standing_rank.py:",
            marks=pytest.mark.slow,
        ),
        ("slow_storage", f"stands before the forward pass of step {WRONG_STEP} (standing_rank.py:"),
    ],
)
def test_a_rank_that_the_others_wait_for_is_named(tmp_path: Path, fault: str, said: str) -> None:
    ends = trained(tmp_path, fault, "raise")
    assert [ends[rank][0] for rank in (0, 2)] == [1, 1], "they end, and do not wait for the time-out of torch"
    lines = said_by_watch(ends[0][2])
    assert lines, ends[0][2]
    assert "Traceback" not in ends[0][2], "no other rank has ended before this one has said why"
    assert f"rank {WRONG_RANK} (" in lines[0]
    assert said in lines[0]
    assert "consistency.watch" not in ends[2][2], "one rank speaks"
    line = json.loads((tmp_path / "watch" / "watch.jsonl").read_text().splitlines()[-1])
    assert (line["step"], line["check"], line["status"]) == (WRONG_STEP, "the training moves", "finding")
    report = json.loads((tmp_path / "watch" / "report.json").read_text())
    assert [finding["kind"] for finding in report["findings"]] == ["stands-still"]


@pytest.mark.slow
def test_a_rank_that_was_killed_is_named_beside_the_error_of_torch(tmp_path: Path) -> None:
    ends = trained(tmp_path, "killed", "warn")
    assert ends[WRONG_RANK][0] == -9
    assert "Traceback" in ends[0][2]
    lines = said_by_watch(ends[0][2])
    assert f"rank {WRONG_RANK} (" in lines[0]
    assert "gives no sign of life" in lines[0]
    assert "last seen" in lines[0], "up to a beat before"


@pytest.mark.slow
def test_a_slow_step_is_no_standstill(tmp_path: Path) -> None:
    for status, output, errors in trained(tmp_path, "slow_step", "raise"):
        assert (status, output.strip()) == (0, "done with 0 findings"), errors
        assert "consistency.watch" not in errors
