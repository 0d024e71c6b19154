"""The tool on four devices that are none: what it says when all is well, and when two of them are sent nothing."""

from __future__ import annotations

import pytest

from consistency.comparison import TensorComparison

from .fixtures import RunOnDouble, RunsOnDouble

ARCHITECTURES = ["A", "A", "B", "B"]
DROPPED = [{"from": "npu:0", "to": f"npu:{to}", "does": "drop"} for to in (1, 3)]


@pytest.fixture(scope="module")
def faulty(run_on_double: RunsOnDouble) -> RunOnDouble:
    """Run on devices of which two get nothing from device 0."""
    return run_on_double({"architectures": ARCHITECTURES, "copies": DROPPED, "fill": 203})


def on_road(run: RunOnDouble, road: str, *stages: str) -> list[TensorComparison]:
    return [t for t in run.comparison.tensors if t.road == road and t.stage in stages]


def test_dropped_copies_are_found_on_the_shared_road_alone(faulty: RunOnDouble) -> None:
    assert faulty.process.returncode == 1, faulty.process.stderr
    factors = [t for t in on_road(faulty, "shared", "adapter") if t.tensor in ("lora_A", "lora_B")]
    assert len(factors) == 56
    for tensor in factors:
        assert tensor.classes[0] == ("cpu", "npu:0", "npu:2")
        assert {name for names in tensor.classes[1:] for name in names} == {"npu:1", "npu:3"}
    assert {row.diagnosis for t in factors for row in t.rows if row.status != "equal"} == {"zeros", "fresh-init"}
