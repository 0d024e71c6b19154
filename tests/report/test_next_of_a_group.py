"""The next step of what ranks find together."""

from __future__ import annotations

import msgspec

from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.comparison.compare import compare
from consistency.numerics.words import Word
from consistency.report.findings import findings_of
from tests.conftest import MakeCapture


def test_a_finding_of_collectives_is_to_be_bisected(make_capture: MakeCapture) -> None:
    right = TensorRecord(rule="limit", status="equal", stage="collectives", layer="all_reduce.sum", tensor="float32 1")
    wrong = msgspec.structs.replace(right, status="outside", word=Word.DIFFERS)
    folder = make_capture("a", {"cpu": [right], "cpu@baseline": [wrong]})
    (finding,) = (one for one in findings_of(compare([read_capture(folder)]), "out") if one.severity == "error")
    assert finding.workers == ("cpu@baseline",)
    assert finding.next == "consistency bisect out --finding 1"
