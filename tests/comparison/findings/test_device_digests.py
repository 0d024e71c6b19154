"""A device that gets test words wrong is an error, however equal its tensors are."""

from __future__ import annotations

from consistency.capture.names import DIGEST_FAULT
from tests.comparison.made_records import compared, moved
from tests.conftest import MakeCapture


def test_a_device_that_sums_test_words_wrong_is_an_error(make_capture: MakeCapture) -> None:
    records = {name: [moved()] for name in ("cpu", "cuda:0", "cuda:1")}
    assert compared(make_capture("a", records)).verdict == "consistent"
    wrong = {"cuda:1": {"environment": {DIGEST_FAULT: "the device's sums are wrong in 2 of 5 test rows"}}}
    found = compared(make_capture("b", records, info=wrong))
    (finding,) = (finding for finding in found.findings if finding.kind == "wrong-digest")
    assert (found.verdict, finding.severity, finding.workers) == ("inconsistent", "error", ("cuda:1",))
    assert "2 of 5 test rows" in finding.message
