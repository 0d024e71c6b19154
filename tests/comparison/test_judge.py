"""Judging a computed tensor by the error that rounding makes on the reference worker."""

from __future__ import annotations

import math
from typing import Any

import pytest

from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from tests.comparison.made_records import compared, computed, measured, only_row, rounding
from tests.conftest import MakeCapture


def relative(bits: str, error: float, made: float, dtype: str = "float32", shape: tuple[int, ...] = (2**14, 2)) -> Any:
    measure: Measure = measured(bound_ratio=None, max_abs=Real(error))
    return computed(
        bits, stage="merged", rule="relative", status="measured", measure=measure, diagnosis=None, dtype=dtype,
        shape=shape, rounding=rounding(made, samples=math.prod(shape)),
    )  # fmt: skip


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
