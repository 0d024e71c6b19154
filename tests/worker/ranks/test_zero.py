"""ZeRO-3, where DeepSpeed is installed: it is built on the machine, and no dependency of the tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.worker.ranks.test_stages import DEVICES, run, statuses

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.skipif(len(DEVICES) < 2, reason="this processor has one kernel variant: there is no group"),
]


def test_healthy_ranks_train_by_zero(tmp_path: Path) -> None:
    found = run(tmp_path, "--stages", "shards")
    assert {finding["severity"] for finding in found["findings"]} == {"note"}
    assert statuses(found, "shards", "ZeRO-3, lora_A.updated") == {"within"}
    assert statuses(found, "shards", "lora_A.gradient of 2 ranks, ZeRO-3") == {"within"}
    assert statuses(found, "shards", "ZeRO-3, updated parameters") == {"equal"}
