"""What `consistency doctor` prints of devices that the hardware log does not list."""

from __future__ import annotations

import io

from consistency.comparison.result import WorkerSummary
from consistency.report.console import make_console
from consistency.report.terminal import print_doctor
from tests.report.made_comparisons import comparison, worker

CPU = worker("cpu", "x86-64", model="Xeon")


def text_of(*workers: WorkerSummary) -> str:
    file = io.StringIO()
    print_doctor(comparison([], workers=(CPU, *workers)), make_console(file), elapsed_s=1.0)
    return " ".join(file.getvalue().split())


def test_the_first_run_on_a_model_is_said_to_be_one() -> None:
    text = text_of(worker("cuda:0", model="H100"), worker("cuda:1", model="H100"))
    assert "no run on H100 is known yet: docs/first-gpu.md has ten commands to see what it does there" in text


def test_without_such_a_device_nothing_is() -> None:
    assert "first-gpu" not in text_of()
    assert "first-gpu" not in text_of(worker("npu:0", model="Double", simulated=True))
