"""Whatever workers record: no verdict is `consistent` over a wrong row, and none tells of what was not compared."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from consistency.capture.folder import SCHEMA, Capture, CaptureManifest, WorkerCapture
from consistency.capture.records import TensorRecord, WorkerInfo
from consistency.case.case import Case
from consistency.case.stages import SPECS
from consistency.comparison.compare import compare
from consistency.comparison.result import BAD, Comparison, Finding
from consistency.numerics import words
from consistency.numerics.rules import Rule
from consistency.report.sentences import sentence
from tests.comparison.made_records import digest, measured

COMPARED = frozenset({"equal", "within", "outside"})
_DIGESTS = st.sampled_from([None, digest("a"), digest("b")])


@st.composite
def records(draw: st.DrawFn) -> TensorRecord:
    status = draw(
        st.sampled_from(["equal", "within", "outside", "missing", "unexpected", "skipped", "blocked", "measured"])
    )
    has_measure = status in ("within", "outside") or draw(st.booleans())
    return TensorRecord(
        stage=draw(st.sampled_from(list(SPECS))),
        layer=draw(st.sampled_from(["layers.0", "cpu->cuda:0", "cpum>cuda:0", "model", "adapter_settings", "logits"])),
        tensor=draw(st.sampled_from(["weight", "lora_A", "placement", "direct", "adapter_on", "loaded_again"])),
        rule=draw(st.sampled_from([rule.value for rule in Rule])),
        status=status,  # type: ignore[arg-type]
        digest=draw(_DIGESTS),
        reference_digest=draw(_DIGESTS),
        reference=draw(st.sampled_from([None, "file", "float64", "payload"])),
        measure=measured() if has_measure else None,
        word=draw(st.sampled_from([None, *words.declared()])),
        reason=draw(st.sampled_from([None, "no kernel"])),
        load_path=draw(st.sampled_from(["", "", "", "isolated+cpu"])),
        shape=(2, 2), dtype="float32",
    )  # fmt: skip


def of_one_worker(found: list[TensorRecord]) -> list[TensorRecord]:
    return list({(record.load_path, *record.key): record for record in found}.values())


Workers = dict[str, list[TensorRecord]]
WORKERS = st.lists(st.lists(records(), max_size=5).map(of_one_worker), min_size=1, max_size=3).map(
    lambda found: dict(zip(("cpu", "cuda:0", "cuda:1"), found, strict=False))
)


MANIFEST = CaptureManifest(
    schema=SCHEMA, tool="0", created="2026-01-01", host="a", workers=(),
    case=Case(name="made-up", base="base", adapter="adapter"),
)  # fmt: skip
_ELSEWHERE = TensorRecord(
    stage="operators", layer="layers.0", tensor="weight", shape=(2, 2), dtype="float32", rule="bitwise",
    status="missing", load_path="isolated+cpu",
)  # fmt: skip
DONE = ("base", "adapter", "merged", "forward")


def compared(workers: Workers) -> Comparison:
    """Compare a capture that is in memory alone: to write and read it takes longer than to compare it."""
    seen = [
        WorkerCapture(
            info=WorkerInfo(
                name=name, load_path="isolated", architecture="x86-64", model="chip", status="ok", stages_done=DONE
            ),
            parts=(tuple(records),),
        )
        for name, records in workers.items()
    ]
    return compare([Capture(folder=Path("/nowhere/a"), manifest=MANIFEST, workers=tuple(seen))])


def is_named(finding: Finding, tensor: str, worker: str) -> bool:
    of_all = not finding.workers or tensor.startswith("transfer::")  # of a chain, the devices of a hop are to blame
    return tensor in finding.tensors and (of_all or worker in finding.workers)


@given(workers=WORKERS)
@example(workers={"cpu": [_ELSEWHERE]})
@settings(deadline=None, max_examples=300)
def test_no_wrong_row_is_consistent_and_no_stage_is_named_that_was_not_compared(workers: Workers) -> None:
    found = compared(workers)
    for tensor in found.tensors:
        for worker, row in tensor.by_worker():
            assert row.status != "blocked" or found.verdict != "consistent"
            if row.status in BAD:
                about = [one for one in found.findings if is_named(one, tensor.name, worker)]
                assert any(one.severity == "error" for one in about) or (
                    "+" in tensor.load_path and any(one.severity == "warning" for one in about)
                )
    if found.verdict != "consistent":
        return
    rows = [(tensor.stage, row.status) for tensor in found.tensors for row in tensor.outcomes]
    judged = {stage for stage, status in rows if status in COMPARED}
    assert judged
    text = sentence(found).partition(";")[0]
    assert {stage for stage in SPECS if re.search(rf"\b{stage}\b", text)} <= judged, text
