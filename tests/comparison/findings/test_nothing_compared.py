"""A comparison that compared nothing is no success, and neither is one of captures with nothing in common."""

from __future__ import annotations

from consistency.capture.records import TensorRecord
from consistency.comparison import kinds
from consistency.report.sentences import sentence
from tests.comparison.made_records import compared, computed, moved
from tests.conftest import MakeCapture


def skipped(stage: str = "forward") -> TensorRecord:
    return TensorRecord(
        rule="bitwise", stage=stage, layer="model", tensor="adapter_on", status="skipped", reason="no inputs"
    )


def peer() -> TensorRecord:
    return computed(stage="base", rule="peer", measure=None, status="measured", word=None)


def test_a_run_in_which_everything_is_skipped_is_incomplete(make_capture: MakeCapture) -> None:
    found = compared(make_capture("a", {"cpu": [skipped()], "cuda:0": [skipped()]}))
    assert (found.verdict, found.exit_status) == ("incomplete", 3)
    assert sentence(found) == "nothing was compared: no inputs"


def test_a_device_alone_is_not_compared_with_itself(make_capture: MakeCapture) -> None:
    alone = compared(make_capture("a", {"cpu": [peer()]}))
    assert alone.verdict == "incomplete"
    assert "there is one worker" in sentence(alone)
    assert compared(make_capture("b", {"cpu": [peer()], "cuda:0": [peer()]})).verdict == "consistent"


def test_a_file_or_an_exact_value_suffices_for_one_device(make_capture: MakeCapture) -> None:
    found = compared(make_capture("a", {"cpu": [moved(), skipped()]}))
    assert found.verdict == "consistent"
    assert sentence(found) == "the adapter agrees with the files; forward not compared"


def test_captures_with_nothing_in_common_are_not_called_consistent(make_capture: MakeCapture) -> None:
    one = make_capture("a", {"cpu": [moved()]}, case={"stages": ("adapter",)})
    other = make_capture("b", {"cpu": [computed()]}, case={"stages": ("merged",)})
    found = compared(one, other)
    assert found.verdict == "incomplete"
    assert sentence(found) == "the 2 captures have no tensor in common: a:cpu (adapter), b:cpu (merged)"
    assert compared(one, make_capture("c", {"cpu": [moved(), computed()]})).verdict == "consistent"


def test_the_one_capture_that_has_nothing_in_common_with_the_others_is_named(make_capture: MakeCapture) -> None:
    same = [make_capture(name, {"cpu": [moved()]}, case={"stages": ("adapter",)}) for name in "ab"]
    apart = make_capture("c", {"cpu": [computed()]}, case={"stages": ("merged",)})
    found = compared(*same, apart)
    assert found.verdict == "incomplete"
    assert [f.workers for f in found.findings if f.kind == kinds.NOTHING_COMPARED] == [("c:cpu",)]


def test_a_lost_worker_is_reported_as_that_alone(make_capture: MakeCapture) -> None:
    lost = {"cpu": {"status": "lost", "reason": "killed"}}
    found = compared(make_capture("a", {"cpu": []}, info=lost))
    assert kinds.NOTHING_COMPARED not in [f.kind for f in found.findings]
