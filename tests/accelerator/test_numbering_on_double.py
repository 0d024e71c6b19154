"""A device that is counted when the devices are listed, and that the runtime skips: later ones shift by one."""

from __future__ import annotations

import pytest

from tests.accelerator.fixtures import RunOnDouble, RunsOnDouble

pytestmark = pytest.mark.slow

SHIFTED = {"devices": 3, "lost": [0], "lost_after_discovery": True}


@pytest.fixture(scope="module", params=["isolated", "shared"])
def shifted(request: pytest.FixtureRequest, run_on_double: RunsOnDouble) -> RunOnDouble:
    return run_on_double(
        SHIFTED, devices="cpu,npu:0,npu:2", stages="base", level="quick", load_paths=request.param, threads="1"
    )  # fmt: skip


def test_no_worker_speaks_for_another_card(shifted: RunOnDouble) -> None:
    assert shifted.process.returncode == 3, shifted.process.stdout + shifted.process.stderr
    status = {worker["name"]: (worker["status"], worker["reason"]) for worker in shifted.report["workers"]}
    assert status["cpu"] == ("ok", None)
    assert status["npu:0"][0] == status["npu:2"][0] == "failed"
    assert status["npu:0"][1].startswith("npu:0 is another device than was listed: SIM-")
    assert status["npu:2"][1].startswith("torch cannot open npu:2: ")
