"""The note on what requantizing costs, and the warning that a pass rewrites weights."""

from __future__ import annotations

from typing import Any

import pytest

from consistency.capture.records import TensorRecord
from consistency.comparison import kinds
from consistency.comparison.result import Comparison, Finding
from tests.comparison.made_records import compared, digest
from tests.conftest import MakeCapture


def merge(layer: str, **figures: float) -> TensorRecord:
    evidence: dict[str, Any] = {
        "error_in_steps_max": 0.5, "error_in_steps_rms": 0.28, "error_rms": 2e-3, "delta_rms": 1e-3, **figures
    }  # fmt: skip
    return TensorRecord(
        stage="merged", layer=layer, tensor="weight", rule="peer", dtype="float32", status="measured",
        digest=digest(layer), evidence=evidence,
    )  # fmt: skip


def after_a_pass(status: Any, **evidence: str) -> TensorRecord:
    return TensorRecord(
        stage="base", layer="layers.0.q", tensor="weight_after_a_pass", rule="limit", status=status, evidence=evidence
    )


def of_kind(found: Comparison, kind: str) -> list[Finding]:
    return [finding for finding in found.findings if finding.kind == kind]


def test_the_error_of_requantizing_is_one_note(make_capture: MakeCapture) -> None:
    records = [merge("layers.0.q"), merge("layers.1.q", error_in_steps_max=0.52, error_rms=5e-3)]
    found = compared(make_capture("a", {"cpu": records, "cuda:0": records}))
    (note,) = of_kind(found, kinds.REQUANTIZED)
    assert (note.severity, note.workers) == ("note", ("cpu", "cuda:0"))
    assert note.message == (
        "merged · cpu, cuda:0 · merging quantizes 2 weights again: error at most 0.52 steps, RMS 0.28 steps; "
        "that is 2 to 5 times the RMS of what the adapter adds"
    )
    assert found.verdict == "consistent"


def test_an_adapter_that_adds_nothing_divides_by_nothing(make_capture: MakeCapture) -> None:
    (note,) = of_kind(compared(make_capture("a", {"cpu": [merge("q", delta_rms=0.0)]})), kinds.REQUANTIZED)
    assert note.message.endswith("RMS 0.28 steps")


def test_a_merge_into_a_plain_weight_is_not_noted(make_capture: MakeCapture) -> None:
    plain = TensorRecord(
        stage="merged", layer="q", tensor="weight", rule="peer", dtype="float32", status="measured", digest=digest("q")
    )
    assert of_kind(compared(make_capture("a", {"cpu": [plain]})), kinds.REQUANTIZED) == []


@pytest.mark.parametrize(("status", "count"), [("equal", 0), ("within", 1)])
def test_a_pass_that_rewrites_weights_is_a_warning(make_capture: MakeCapture, status: str, count: int) -> None:
    record = after_a_pass(status, read="off by up to 0.3, where the largest is 0.2", how="packed for the CPU: True")
    found = compared(make_capture("a", {"cpu": [merge("q"), record]}))
    warnings = of_kind(found, kinds.REPACKED_WEIGHTS)
    assert len(warnings) == count
    for warning in warnings:
        assert warning.severity == "warning"
        assert "dequantizes other values: off by up to 0.3" in warning.message
    assert found.verdict == "consistent"
