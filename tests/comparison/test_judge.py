"""Judging a computed tensor by the error that rounding makes on the reference worker."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from consistency.capture.records import TensorRecord
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from tests.comparison.made_records import compared, computed, forward, measured, only_row, rounding
from tests.conftest import MakeCapture


def relative(bits: str, error: float, made: float, dtype: str = "float32", shape: tuple[int, ...] = (2**14, 2)) -> Any:
    measure: Measure = measured(ratio=None, max_abs=Real(error))
    return computed(
        bits, stage="merged", rule="relative", status="measured", measure=measure, word=None, dtype=dtype,
        shape=shape, rounding=rounding(made, samples=math.prod(shape)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("worker", "largest", "status"),
    [
        ("cpu@baseline", 1e-7, "within"), ("cpu@baseline", 1.9e-7, "within"), ("cpu@baseline", 1e-4, "outside"),
        ("cuda:0", 1e-4, "within"),
    ],
)  # fmt: skip
def test_a_block_is_not_excused_by_noise_of_wrong_kernels(
    make_capture: MakeCapture, worker: str, largest: float, status: str
) -> None:
    """Passes with noise on this worker's own CPU were a thousand times as wrong as those of the reference worker."""
    fields: dict[str, Any] = {"stage": "forward", "layer": "model.layers.0", "tensor": "adapter_on", "rule": "block"}
    here = computed(bits="b", rounding=rounding(largest), **fields)
    found = compared(make_capture("a", {"cpu": [computed(rounding=rounding(1e-7), **fields)], worker: [here]}))
    row = only_row(found, worker)
    assert row.status == status
    assert float(row.ratio) == pytest.approx(0.5 if status == "within" else 250)


def test_what_is_shown_and_not_judged_says_so(make_capture: MakeCapture) -> None:
    fields: dict[str, Any] = {"stage": "forward", "layer": "logits", "tensor": "adapter_on.end_to_end", "rule": "block"}
    shown = computed(measure=measured(ratio=None), word=None, reason="shown, not judged", **fields)
    row = only_row(compared(make_capture("a", {"cpu": [shown], "cuda:0": [shown]})), "cuda:0")
    assert (row.status, row.ratio, row.reason) == ("within", None, "shown, not judged")


def test_a_kernel_variant_is_not_excused_by_its_own_error(make_capture: MakeCapture) -> None:
    records = {"cpu": [relative("a", 1e-7, 1e-7)], "cpu@baseline": [relative("b", 1e-3, 1e-3)]}
    assert only_row(compared(make_capture("a", records)), "cpu@baseline").status == "outside"


def test_few_logits_may_be_off_by_more(make_capture: MakeCapture) -> None:
    records = {"cpu": [relative("a", 1e-7, 1e-7, shape=(4,))], "cuda:0": [relative("b", 9e-7, 1e-7, shape=(4,))]}
    assert only_row(compared(make_capture("a", records)), "cuda:0").status == "within"


@pytest.mark.parametrize(("dtype", "status"), [("float16", "skipped"), ("float32", "outside")])
def test_only_float16_may_overflow(make_capture: MakeCapture, dtype: str, status: str) -> None:
    records = {name: [relative(name, math.nan, math.nan, dtype=dtype)] for name in ("cpu", "cuda:0")}
    assert only_row(compared(make_capture("a", records)), "cuda:0").status == status


def test_a_stage_that_raises_on_one_device_is_told_by_its_exception(make_capture: MakeCapture) -> None:
    gradient = [
        computed(stage="gradient", layer=f"layers.{n}.q", tensor="lora_A.gradient", rule="relative",
                 measure=measured(ratio=None), rounding=rounding(1e-7), status="measured", word=None)
        for n in range(3)
    ]  # fmt: skip
    why = "the backward pass of this model fails: RuntimeError: modified by an inplace operation"
    raised = computed(
        stage="gradient", layer="model", tensor="adapter_on", rule="relative", status="skipped", reason=why,
        measure=None, word=None,
    )  # fmt: skip
    found = compared(make_capture("a", {"cpu": gradient, "cuda:0": [raised]}))
    (finding,) = found.findings
    assert finding.message == f"gradient · cuda:0 · 3 of 3 lora_A.gradient tensors missing: {why}"
    assert not any(why in line for line in finding.detail)


def test_a_mode_that_raises_on_one_device_is_told_by_its_exception(make_capture: MakeCapture) -> None:
    why = "PEFT does not merge this adapter: KeyError"
    merged = msgspec.structs.replace(forward("b"), tensor="adapter_merged")
    raised = msgspec.structs.replace(merged, layer="model", status="skipped", reason=why, measure=None, digest=None)
    found = compared(make_capture("a", {"cpu": [forward(), merged], "cuda:0": [forward(), raised]}))
    (finding,) = found.findings
    assert finding.message == f"forward · cuda:0 · adapter_merged of logits missing: {why}"


@pytest.mark.parametrize("tensor", ["adapter_on", "adapter_on.input.hidden_states", "adapter_on.long"])
def test_what_a_mode_was_not_run_for_is_the_reason_of_all_its_tensors(make_capture: MakeCapture, tensor: str) -> None:
    """They were missing without a reason: a device lacks an operation that the others have."""
    reason = "an operation of layers.1.mlp is not implemented on npu:0"
    not_run = TensorRecord(
        stage="forward", layer="model", tensor="adapter_on", rule="block", status="skipped", reason=reason
    )
    right = computed(stage="forward", layer="layers.1", tensor=tensor, rule="block")
    found = compared(make_capture("a", {"cpu": [right], "cpu@baseline": [not_run]}))
    (error,) = (one for one in found.findings if one.severity == "error")
    assert error.workers == ("cpu@baseline",)
    assert error.message.endswith(f"{tensor} of layers.1 missing: {reason}")
