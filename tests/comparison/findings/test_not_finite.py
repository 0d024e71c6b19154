"""NaN that equals NaN is no agreement: what was not compared for it is said, with the file that has it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from consistency.capture.records import TensorRecord
from consistency.comparison import kinds
from consistency.numerics.real import Real
from tests.comparison.made_records import compared, computed, forward, measured, moved
from tests.conftest import MakeCapture

ALL = measured(mismatched=0, max_abs=Real(0.0), ratio=None, elements=2**16, not_finite=2**16)
SOME = measured(max_abs=Real(1e-7), ratio=None, elements=2**16, not_finite=3)


def with_measure(record: TensorRecord, **changes: object) -> TensorRecord:
    return msgspec.structs.replace(record, **changes)


def test_equal_nan_is_not_compared_and_the_run_is_incomplete(make_capture: MakeCapture) -> None:
    records = [moved(not_finite=1), with_measure(forward(), measure=ALL)]
    found = compared(make_capture("a", {"cpu": records, "cuda:0": records}))
    assert found.verdict == "incomplete"
    (finding,) = found.findings
    assert (finding.kind, finding.severity, finding.workers) == (
        kinds.NOTHING_COMPARED,
        "error",
        ("cpu", "cuda:0"),
    )
    assert finding.message == (
        "nothing was compared in 1 tensor of forward: every value is NaN or infinite in float64 too, first in "
        "adapter_on of logits; in the adapter's file: 1 of 4 values of lora_B of layers.0.q"
    )
    (row,) = (row for tensor in found.tensors if tensor.stage == "forward" for row in tensor.outcomes)
    assert row.status == "skipped"


@pytest.mark.parametrize("rule", ["bound", "user"])
def test_so_are_values_with_a_bound(make_capture: MakeCapture, rule: str) -> None:
    record = computed(rule=rule, status="equal", measure=msgspec.structs.replace(ALL, ratio=Real(0.0)))
    found = compared(make_capture("a", {"cpu": [moved(), record], "cuda:0": [moved(), record]}))
    assert found.verdict == "incomplete"


def test_nan_where_float64_has_another_is_a_mismatch(make_capture: MakeCapture) -> None:
    wrong = msgspec.structs.replace(ALL, max_abs=Real("nan"))
    records = {"cpu": [with_measure(forward(), measure=ALL)], "cuda:0": [with_measure(forward("b"), measure=wrong)]}
    found = compared(make_capture("a", records))
    row = next(tensor.outcome("cuda:0") for tensor in found.tensors)
    assert row is not None
    assert (row.status, row.word) == ("outside", "non-finite")


def test_a_file_alone_is_a_warning_and_some_values_are_a_note(make_capture: MakeCapture) -> None:
    found = compared(make_capture("a", {"cpu": [moved(not_finite=2)], "cuda:0": [moved()]}))
    (warning,) = found.findings
    assert (found.verdict, warning.kind, warning.severity) == ("consistent", kinds.NON_FINITE_VALUES, "warning")
    assert warning.message == (
        "values are NaN or infinite in the adapter's file: 2 of 4 values of lora_B of layers.0.q"
    )
    records = [moved(), with_measure(forward(), measure=SOME)]
    found = compared(make_capture("b", {"cpu": records, "cuda:0": records}))
    (note,) = found.findings
    assert (found.verdict, note.kind, note.severity) == ("consistent", kinds.NON_FINITE_VALUES, "note")
    assert "3 of 65536 values of adapter_on of logits" in note.message


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_that_overflows_on_every_device_is_not_consistent(make_capture: MakeCapture, dtype: str) -> None:
    """All logits were NaN in float16, blocks that the CPU could not compute either were skipped: consistent."""
    beyond = f"passes in {dtype} on the CPU are NaN or infinite too: there is no error to compare with"
    fields: dict[str, Any] = {"stage": "forward", "rule": "block", "dtype": dtype}
    lost = measured(max_abs=Real("nan"))
    ends = computed(layer="logits", tensor="adapter_on.end_to_end", **fields | {"measure": lost, "status": "measured"})
    block = computed(layer="layers.1.mlp", **fields | {"status": "skipped", "measure": None, "reason": beyond})
    records = [moved(), ends, block]
    (finding, *_) = compared(make_capture("a", {"cpu": records, "cuda:0": records})).findings
    what = f"outputs are NaN or infinite in {dtype}, and finite in float64"
    assert (finding.severity, finding.message) == ("error", f"forward · cpu, cuda:0 · {what}, first in layers.1.mlp")
    assert finding.general == f"forward · {what}"
    assert ("use bfloat16" in str(finding.next)) == (dtype == "float16")
    other_end = msgspec.structs.replace(ends, dtype="float32", tensor="adapter_off.end_to_end")
    mixed = compared(make_capture("c", {"cpu": records, "cuda:0": [moved(), other_end]}))
    by_worker = {f.workers: f.tensors for f in mixed.findings if f.kind == kinds.NON_FINITE_VALUES}
    assert by_worker[("cpu",)] == ("forward::logits.adapter_on.end_to_end",)
    assert by_worker[("cuda:0",)] == ("forward::logits.adapter_off.end_to_end",)
    wrong = compared(make_capture("b", {"cpu": [moved(), forward()], "cuda:0": [moved("other"), *records[1:]]}))
    assert not any(one.kind == kinds.NON_FINITE_VALUES for one in wrong.findings)
