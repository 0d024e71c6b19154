"""A torch that is built for CUDA, on a machine without a driver: `tox -e cuda-wheel` installs one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Cli

KINDS = ("no-accelerator", "unused-card")

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(),
    reason="needs a torch that is built for CUDA, without a GPU: tox -e cuda-wheel",
)


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without the user's own list of GPUs."""
    return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | changes


def missed(folder: Path) -> list[dict[str, Any]]:
    """Return the findings of a report that say that there is no GPU."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return [finding for finding in report["findings"] if finding["kind"] in KINDS]


def test_a_run_warns_and_so_does_its_status(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "run", "--level", "quick", "--stages", "base", "--out", tmp_path / "out", env=environment(), by_exec=True
    )
    assert done.returncode == 0, done.stderr
    (finding,) = missed(tmp_path / "out")
    assert finding["severity"] == "warning"
    assert "torch is built for CUDA and finds no device" in done.stdout
    assert "NVML: " in finding["message"]
    status = cli("status", tmp_path / "out", "--format", "nagios")
    assert status.stdout.startswith("CONSISTENCY WARNING")


def test_doctor_has_something_to_fix(cli: Cli) -> None:
    done = cli("doctor", "--level", "quick", env=environment())
    assert "nothing to fix" not in done.stdout
    assert "torch is built for CUDA and finds no device" in done.stdout


def test_who_hides_the_gpus_is_not_warned(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "run", "--level", "quick", "--stages", "base", "--out", tmp_path / "out",
        env=environment(CUDA_VISIBLE_DEVICES=""),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert missed(tmp_path / "out") == []


def test_a_gpu_that_is_named_is_refused_with_the_reason(cli: Cli) -> None:
    done = cli("run", "--devices", "cuda:0", env=environment(), by_exec=True)
    assert done.returncode == 2
    assert "torch is built for CUDA and finds no device: NVML: " in done.stderr
