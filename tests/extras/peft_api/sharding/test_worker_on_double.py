"""A model over four devices that are none: what broken copies between them do to its ids, and what they do not."""

from __future__ import annotations

import pytest

from tests.accelerator.fixtures import RunOnDouble, RunsOnDouble

pytestmark = pytest.mark.slow

DROPPED = [{"from": "npu:0", "to": "npu:1", "does": "drop"}]


@pytest.fixture(scope="module")
def runs(run_on_double: RunsOnDouble) -> dict[str, RunOnDouble]:
    """Run on devices that are well, of two architectures, and on such whose copies 0→1 never arrive."""
    options = {"devices": "npu:0", "stages": "forward,sharding", "load_paths": "shared"}
    return {
        "well": run_on_double({"architectures": ["A", "B", "A", "A"]}, **options),
        "dropped": run_on_double({"copies": DROPPED, "fill": 203}, **options),
    }


def test_a_sharded_model_is_no_finding(runs: dict[str, RunOnDouble]) -> None:
    run = runs["well"]
    assert run.process.returncode == 0, run.process.stdout + run.process.stderr
    moves = {t.layer: row.evidence for t in run.comparison.tensors for row in t.outcomes if t.tensor == "on the way"}
    assert moves["layers in turn"]["devices"] == ["npu:0", "npu:1", "npu:2", "npu:3"]
    assert moves["layers in turn"]["moves"] > 10
    statuses = {(t.layer, t.tensor): row.status for t in run.comparison.tensors for row in t.outcomes}
    assert statuses["layers in turn", "logits"] == "within", "kernels of two architectures sum in another order"
    assert statuses["npu and cpu", "logits"] == "equal"


def test_ids_that_never_arrive_are_told_before_a_kernel_asserts(runs: dict[str, RunOnDouble]) -> None:
    run = runs["dropped"]
    assert run.process.returncode == 1, run.process.stderr
    first = next(f for f in run.comparison.findings if f.kind == "ids-changed")
    assert first.workers == ("npu:0",)
    assert "ids changed during transfer to device npu:1" in first.message
    staged = [t for t in run.comparison.tensors if t.layer == "layers in turn, by way of the host"]
    assert {row.status for t in staged if t.tensor == "on the way" for row in t.outcomes} == {"equal"}
