"""The facts of a reproducer: the tolerance of a tensor, and the device of its worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from consistency.extras.diagnosis.reproduce import parts
from consistency.numerics.rules import judge_relative
from tests.comparison.made_records import computed, forward


def of(record: Any, *, name: str = "cpu", engine: str | None = None, environment: dict[str, str] | None = None) -> Any:
    worker = SimpleNamespace(info=SimpleNamespace(name=name, engine=engine, environment=environment or {}))
    return SimpleNamespace(record=record, worker=worker)


def test_the_tolerance_of_a_tensor_of_the_relative_rule_follows_from_rounding() -> None:
    """It was zero, so that the script showed an element that is right: the first that has other bits."""
    record = forward(error=1e-3)
    assert record.measure is not None
    assert record.rounding is not None
    allowed = parts._allowed(of(record))
    assert allowed == judge_relative(record.measure, "float32", record.rounding).allowed
    assert 0 < allowed < 1e-3


def test_the_tolerance_of_a_bound_is_that_of_its_ratio() -> None:
    record = computed(ratio=4.0)
    assert record.measure is not None
    assert parts._allowed(of(record)) == pytest.approx(float(record.measure.max_abs) / 4)


@pytest.mark.parametrize(
    ("name", "engine", "environment", "device"),
    [
        ("cpu@baseline", None, {}, "cpu"),
        ("cuda:1@tf32", None, {}, "cuda:1"),
        ("part", "vllm", {}, "part"),
        ("rank 3", None, {"device": "cuda:1"}, "cuda:1"),
    ],
)
def test_a_worker_may_be_named_otherwise_than_its_device(
    name: str, engine: str | None, environment: dict[str, str], device: str
) -> None:
    assert parts.device_of(of(computed(), name=name, engine=engine, environment=environment)) == device
