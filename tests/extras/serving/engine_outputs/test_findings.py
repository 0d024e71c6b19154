"""What a report says of an inference engine of which nothing could be compared."""

from __future__ import annotations

from consistency.capture.names import ADAPTER_OFF, ADAPTER_ON, NOT_IN_FILE, UNSUPPORTED
from consistency.capture.records import TensorRecord
from consistency.comparison import kinds
from consistency.extras.serving.inference.request import OUTPUT
from tests.comparison.made_records import compared, moved
from tests.conftest import MakeCapture


def skipped(mode: str, reason: str) -> TensorRecord:
    return TensorRecord(
        stage="forward", layer=OUTPUT, tensor=mode, rule="relative", status="skipped", reason=reason,
        evidence={UNSUPPORTED: True},
    )  # fmt: skip


def test_what_the_engine_was_not_asked_for_is_no_reason(make_capture: MakeCapture) -> None:
    """Any other reason is said, whatever its words."""
    failure = "ValueError: a router, of which the model has none"
    workers = {"cpu": [moved()], "vllm": [skipped(ADAPTER_ON, failure), skipped(ADAPTER_OFF, NOT_IN_FILE)]}
    found = compared(make_capture("a", workers, info={"vllm": {"engine": "vllm 1"}}))
    (finding,) = [one for one in found.findings if one.kind == kinds.NOTHING_COMPARED]
    assert finding.message == f"forward · vllm · nothing was compared of this engine: {failure}"


def test_an_engine_that_answered_another_mode_alone_is_told_which_were_wanted(make_capture: MakeCapture) -> None:
    workers = {"cpu": [moved()], "vllm": [skipped(ADAPTER_OFF, NOT_IN_FILE), skipped(ADAPTER_ON, NOT_IN_FILE)]}
    found = compared(make_capture("a", workers, info={"vllm": {"engine": "vllm 1"}}))
    (finding,) = [one for one in found.findings if one.kind == kinds.NOTHING_COMPARED]
    wanted = "its file has no outputs of adapter_off, adapter_on, and the run has no others"
    assert finding.message == f"forward · vllm · nothing was compared of this engine: {wanted}"
