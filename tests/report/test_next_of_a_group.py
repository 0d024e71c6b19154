"""The next step of what ranks find together."""

from __future__ import annotations

import msgspec
import pytest

from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.case.stages import Stage, stages_of
from consistency.comparison.compare import compare
from consistency.numerics.words import Word
from consistency.report.findings import findings_of
from tests.conftest import MakeCapture


@pytest.mark.parametrize("stage", stages_of(lambda spec: spec.together))
def test_what_ranks_find_together_is_to_be_bisected(make_capture: MakeCapture, stage: Stage) -> None:
    """No one device can show it again."""
    right = TensorRecord(rule="limit", status="equal", stage=stage, layer="layer", tensor="float32 1")
    wrong = msgspec.structs.replace(right, status="outside", word=Word.DIFFERS)
    folder = make_capture("a", {"cpu": [right], "cpu@baseline": [wrong]})
    (finding,) = (one for one in findings_of(compare([read_capture(folder)]), "out") if one.severity == "error")
    assert finding.workers == ("cpu@baseline",)
    assert finding.next == "consistency bisect out --finding 1"
