"""An adapter that changes nothing is a warning; one that may change something is not."""

from __future__ import annotations

from typing import Any

import pytest

from consistency.capture.names import NO_OUTPUT
from consistency.capture.records import TensorRecord
from consistency.comparison import kinds
from consistency.comparison.result import Comparison, Finding
from consistency.numerics import words
from consistency.numerics.real import Real
from tests.comparison.made_records import compared, computed, digest, forward, measured
from tests.conftest import MakeCapture


def settings(effect: Any, **changes: Any) -> TensorRecord:
    fields: dict[str, Any] = {"status": "measured", "evidence": {"zero": "8 of 8 lora_B tensors"}, **changes}
    return TensorRecord(
        stage="adapter", layer="adapter_settings", tensor="rank_and_scaling", rule="peer", dtype="uint8",
        **{"status": "equal", "digest": digest("s"), "effect": effect, **fields},
    )  # fmt: skip


def outputs(on: str, off: str, **changes: Any) -> list[TensorRecord]:
    found = []
    for tensor, bits in (("adapter_on.end_to_end", on), ("adapter_off.end_to_end", off)):
        record = forward(bits)
        fields = {name: getattr(record, name) for name in record.__struct_fields__} | {"tensor": tensor, **changes}
        found.append(TensorRecord(**fields))
    return found


def warnings(found: Comparison) -> list[Finding]:
    return [finding for finding in found.findings if finding.kind == kinds.NO_EFFECT]


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([settings("zero-weights")], "8 of 8 lora_B tensors are zero"),
        ([settings("zero-scaling")], "8 of 8 lora_B tensors is zero"),
        ([settings("no-layer")], "no layer of the base is adapted"),
        ([settings("layers"), computed(tensor="delta", effect="zero-delta")], "1 of 1 deltas are zero"),
        (
            [settings("layers"), computed(tensor="delta", layer="lm_head"), *outputs("a", "a")],
            "1 output with and without it is bitwise equal; the deltas are not zero, so the model leaves out lm_head",
        ),
        ([settings(""), *outputs("a", "a")], "1 output with and without it is bitwise equal"),
    ],
)
def test_each_cause_is_named(make_capture: MakeCapture, records: list[TensorRecord], text: str) -> None:
    found = compared(make_capture("a", {"cpu": records, "cuda:0": records}))
    (warning,) = warnings(found)
    assert (warning.severity, warning.workers) == ("warning", ("cpu", "cuda:0"))
    assert warning.message == f"adapter · cpu, cuda:0 · the adapter changes nothing: {text}"
    assert found.verdict != "inconsistent"


@pytest.mark.parametrize(
    "records",
    [
        [settings("layers"), *outputs("a", "b")],
        [settings("zero-weights"), *outputs("a", "b")],
        [settings("layers"), computed(tensor="delta"), computed(tensor="delta", layer="l1", effect="zero-delta")],
        [settings(""), computed(tensor="delta", effect="zero-delta")],
        [settings("some-tokens"), *outputs("a", "a")],
        [settings(""), *outputs("a", "a", measure=measured(ratio=None, max_abs=Real(float("nan"))))],
        [settings("layers")],
        [settings("zero-weights", status="outside", word=words.INACTIVE), *outputs("a", "a")],
    ],
    ids=[
        "outputs differ", "outputs decide", "one delta is not zero", "a layer was saved whole", "other tokens",
        "values are not finite", "nothing is known", "it is inactive, an error of its own",
    ],
)  # fmt: skip
def test_what_may_change_something_is_no_warning(make_capture: MakeCapture, records: list[TensorRecord]) -> None:
    assert warnings(compared(make_capture("a", {"cpu": records}))) == []


def test_outputs_that_differ_on_any_device_show_an_effect(make_capture: MakeCapture) -> None:
    """Equal outputs on another device are a fault of that one."""
    workers = {"cpu": [settings(""), *outputs("a", "b")], "cuda:0": [settings(""), *outputs("b", "b")]}
    assert warnings(compared(make_capture("a", workers))) == []


def test_a_run_without_an_adapter_and_a_part_of_a_model_show_nothing(make_capture: MakeCapture) -> None:
    records = [settings(""), *outputs("a", "a")]
    assert warnings(compared(make_capture("a", {"cpu": records}, case={"adapter": None}))) == []
    only = {"only": ("forward::hidden_states.0", "adapter")}
    assert warnings(compared(make_capture("b", {"cpu": records}, case=only))) == []


def test_an_unused_layer_is_named_in_the_note_of_its_gradients(make_capture: MakeCapture) -> None:
    """A model that reads the weight of its head itself."""
    skipped = computed(stage="gradient", layer="lm_head", tensor="lora_A.gradient", rule="block", status="skipped",
                       reason=NO_OUTPUT, measure=None, word=None, digest=None)  # fmt: skip
    (note,) = [one for one in compared(make_capture("a", {"cpu": [skipped]})).findings if one.kind == "skipped"]
    assert note.detail[0].startswith("of lm_head: these inputs do not reach it, or the model reads its weight itself")
