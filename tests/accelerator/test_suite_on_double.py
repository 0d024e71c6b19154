"""Adapters swapped on a base that lies on a device: its bytes are brought back, and each case counts its own copies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from consistency.case.builtin import builtin_folder
from tests.reported import environments, rows

from .fixtures import Double

pytestmark = pytest.mark.slow


def test_an_adapter_is_swapped_on_a_device(double: Double, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(builtin_folder("llama") / "adapter", tmp_path / "adapters" / name)
    done = double.python(
        "-m", "consistency", "run", "--base", "builtin:llama", "--adapter", tmp_path / "adapters/*",
        "--devices", "cpu,npu:1", "--stages", "base,adapter,forward,memory", "--load-paths", "shared",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"out/cases/{name}/report.json").read_text()) for name in ("one", "two"))
    for environment in environments(second).values():
        assert environment["base"].startswith("kept from the case before")
    # PEFT reads the adapter onto npu:0 each time: what the first case took there is not taken for the second one's
    kinds = [[finding["kind"] for finding in report["findings"]] for report in (first, second)]
    assert kinds[0] == kinds[1]
    assert "touched" in kinds[0]
    found = [
        {
            (row["stage"], row["layer"], row["tensor"], row["worker"]): (row["status"], row["max_abs"])
            for row in rows(report)
            if row["stage"] != "memory"
        }
        for report in (first, second)
    ]
    assert found[0] == found[1], "one adapter under two names has one set of numbers"
