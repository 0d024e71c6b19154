"""Variants of one card: the worker of one has ended before that of the next begins, and the reference is there."""

from __future__ import annotations

import json

import pytest

from tests.accelerator.fixtures import RunsOnDouble
from tests.reported import rows

pytestmark = pytest.mark.slow


def test_variants_of_a_card_run_one_after_the_other(run_on_double: RunsOnDouble) -> None:
    run = run_on_double({"devices": 1}, devices="cpu,npu:0,npu:0@math", stages="base,forward", level="quick")
    assert run.process.returncode == 0, run.process.stdout + run.process.stderr
    times = {}
    for path in (run.folder / "captures" / "workers").glob("*/events.jsonl"):
        at = [json.loads(line)["at"] for line in path.read_text(encoding="utf-8").splitlines()]
        times[path.parent.name] = (at[0], at[-1])
    assert times["npu_0.isolated"][1] < times["npu_0@math.isolated"][0]
    assert {row["worker"] for row in rows(run.report, "forward")} == {"cpu", "npu:0", "npu:0@math"}
