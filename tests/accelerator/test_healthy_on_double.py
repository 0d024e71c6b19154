"""Healthy devices with a GPU's arithmetic: nothing is found, by one accumulator, in unsorted routing, in running sums.

`python -m benchmarks.healthy_devices` checks all kinds in all dtypes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.healthy_devices import deepseek, made, wide
from tests.reported import rows

from .fixtures import RunsOnDouble

pytestmark = pytest.mark.slow

GPU_LIKE: dict[str, Any] = {"devices": 2, "architectures": ["S", "T"], "as_cuda": True}


@pytest.mark.parametrize(("kind", "dtype"), [("deepseek", "float32"), ("deepseek", "bfloat16"), ("wide", "float32")])
def test_nothing_is_found_on_healthy_devices(
    kind: str, dtype: str, run_on_double: RunsOnDouble, tmp_path: Path
) -> None:
    """Twice the CPU's own error is less than the wide model's on a GPU; by position, every router's set is flipped."""
    paths = made(tmp_path, {"deepseek": deepseek, "wide": wide}[kind], seed=0)
    devices = "cpu,npu:0,npu:1" if kind == "deepseek" else "cpu,npu:0"
    run = run_on_double(
        GPU_LIKE, base=paths["base"], adapter=paths["adapter"], devices=devices, dtype=dtype, stages="forward",
        load_paths="isolated",
    )  # fmt: skip
    assert run.process.returncode == 0, run.process.stdout
    judged = [row for row in rows(run.report) if row["worker"] != "cpu"]
    assert judged
    assert {row["status"] for row in judged} <= {"within", "equal"}
    assert max(row["ratio"] or 0 for row in judged) < 0.8
