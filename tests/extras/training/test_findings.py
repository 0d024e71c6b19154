"""Workers of which some form a group: what the others did not do is not missing."""

from __future__ import annotations

from consistency.capture.names import WHOLE_MODEL
from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.case.stages import SPECS
from consistency.comparison.compare import compare
from consistency.extras.training.replicas.spec import REPLICAS
from tests.comparison.made_records import moved
from tests.conftest import MakeCapture

STAGE = REPLICAS
WHY = "no other worker runs beside this one on a device of its type"


def test_a_worker_beside_a_group_lacks_no_row_of_it(make_capture: MakeCapture) -> None:
    spec = SPECS[STAGE]
    of_group = moved(stage=STAGE, tensor="lora_B.start")
    apart = TensorRecord(
        rule=spec.rule, status="skipped", reason=WHY, stage=STAGE, layer=WHOLE_MODEL, tensor=spec.whole
    )  # fmt: skip
    folder = make_capture("a", {"cpu": [apart], "cuda:0": [of_group], "cuda:1": [of_group]}, case={"stages": (STAGE,)})
    found = compare([read_capture(folder)])
    assert [finding.severity for finding in found.findings] == ["note"]
    (tensor,) = (one for one in found.tensors if one.tensor == "lora_B.start")
    rows = dict(tensor.by_worker())
    assert {name: row.status for name, row in rows.items()} == {
        "cpu": "skipped", "cuda:0": "equal", "cuda:1": "equal",
    }  # fmt: skip
    assert rows["cpu"].reason == WHY
