"""What follows from the figures of a merge."""

from __future__ import annotations

import math
from typing import Any

import pytest

from consistency.capture.merge_effect import MergeEffect
from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.comparison.compare import compare
from consistency.comparison.merging import Advice, judged
from consistency.numerics.real import Real
from tests.comparison.made_records import computed
from tests.conftest import MakeCapture

HEALTHY: dict[str, Any] = {
    "dtype": "bfloat16", "computed": 0.02, "unmerged_error": 0.01, "merged_error": 0.01, "positions": 128,
    "top1_changed": 3, "top1_unmerged": 2, "adapter": 0.5, "moved": 0.004, "must": 0.004, "exact": 1e-15,
    "float32": 5e-8,
}  # fmt: skip


def effect(**changes: Any) -> MergeEffect:
    fields: dict[str, Any] = {**HEALTHY, **changes}
    real: dict[str, Any] = {name: Real(one) if isinstance(one, float) else one for name, one in fields.items()}
    return MergeEffect(**real)


FLOAT32 = {"dtype": "float32", "float32": None, "unmerged_error": 3e-7, "merged_error": 3e-7, "must": 4e-8}


@pytest.mark.parametrize(("changes", "advice"), [
    ({}, Advice.MERGE),
    ({"moved": 0.012}, Advice.MERGE_IN_FLOAT32),  # three times what it must, and more than computing does
    ({"moved": 0.009}, Advice.MERGE),  # more than twice, and less than computing does
    ({"moved": 0.012, "must": 0.012}, Advice.KEEP_FLOAT32),  # rounding, and more than computing does
    ({"adapter": 0.003}, Advice.KEEP_FLOAT32),  # rounding does what the adapter does
    ({"adapter": 0.0}, Advice.MERGE),
    ({"exact": 1e-6}, Advice.DO_NOT_MERGE),  # computing in float32 would move them by 0.01 * 2**-16
    ({"exact": 1e-7}, Advice.MERGE),
    ({"float32": 0.006}, Advice.DO_NOT_MERGE),  # a bfloat16 delta loses 3 * 2**-8 of 0.5 at most
    ({"float32": 0.005}, Advice.MERGE),
    ({"moved": math.nan}, Advice.NOT_FINITE),
    ({"merged_error": math.inf}, Advice.NOT_FINITE),
    ({"moved": math.nan, "unmerged_error": math.nan}, Advice.UNKNOWN),  # the model itself is not finite
    ({"moved": None, "must": None, "exact": None, "float32": None}, Advice.UNKNOWN),
    ({**FLOAT32, "moved": 5e-8}, Advice.MERGE),
    ({**FLOAT32, "moved": 1e-3}, Advice.MERGE_IN_FLOAT32),
    ({**FLOAT32, "moved": 6e-3}, Advice.DO_NOT_MERGE),
    ({**FLOAT32, "moved": 5e-8, "exact": 4e-7}, Advice.DO_NOT_MERGE),
    ({**FLOAT32, "moved": 4e-7, "must": 4e-7}, Advice.KEEP_FLOAT32),
])  # fmt: skip
def test_every_figure_is_compared_with_another_one_of_the_case(changes: dict[str, Any], advice: Advice) -> None:
    assert judged("cpu", effect(**changes)).advice == advice


def test_it_is_a_fact_of_the_case_and_no_row(make_capture: MakeCapture) -> None:
    bad = effect(exact=1.0, moved=1.0)
    record = TensorRecord(status="equal", stage="merging", layer="model", tensor="logits", rule="limit", merging=bad)
    found = compare([read_capture(make_capture("a", {"cpu": [computed(), record]}))])
    assert found.verdict == "consistent"
    assert [tensor.tensor for tensor in found.tensors] == ["weight"]
    assert not found.findings
    (merging,) = found.merging
    assert merging.worker == "cpu"
    assert merging.advice == Advice.DO_NOT_MERGE
    assert merging.moved == 1.0


def test_each_capture_has_its_own(make_capture: MakeCapture) -> None:
    records = [
        TensorRecord(status="equal", stage="merging", layer="model", tensor="logits", rule="limit", merging=effect())
    ]
    captures = [read_capture(make_capture(name, {"cpu": [computed(), *records]})) for name in ("a", "b")]
    assert [one.worker for one in compare(captures).merging] == ["a:cpu", "b:cpu"]


def test_nothing_is_advised_where_a_merged_weight_is_wrong(make_capture: MakeCapture) -> None:
    record = TensorRecord(
        status="equal", stage="merging", layer="model", tensor="logits", rule="limit", merging=effect()
    )
    wrong = compare([read_capture(make_capture("a", {"cpu": [computed(ratio=2.0), record]}))])
    assert [one.advice for one in wrong.merging] == [""]
    right = compare([read_capture(make_capture("b", {"cpu": [computed(), record]}))])
    assert [one.advice for one in right.merging] == [Advice.MERGE]
