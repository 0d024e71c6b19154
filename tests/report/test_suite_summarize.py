"""What a suite keeps of a comparison."""

from __future__ import annotations

import gc
import weakref

import msgspec

from consistency.capture.json_codec import decode_json, encode_json
from consistency.comparison.findings.causes import causes_of
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.workers import find_device_use
from consistency.comparison.result import Outcome
from consistency.comparison.suite import CaseResult
from consistency.numerics import words
from consistency.report.summarize import summarize
from consistency.stages.memory.spec import THIRD_COPY
from tests.report.made_comparisons import ALL, faulty, tensor
from tests.report.made_suites import case


def test_a_case_keeps_findings_stages_and_workers() -> None:
    kept = case("lora", faulty())
    assert (kept.name, kept.folder, kept.verdict, kept.elapsed_s) == ("lora", "cases/lora", "inconsistent", 1.5)
    assert kept.headline == "adapter · cuda:1 · zeros in 3 of 3 lora_B tensors"
    first = "adapter::model.layers.0.mlp.lora_B"
    zeros, skipped = kept.findings
    assert (zeros.kind, zeros.tensors, zeros.stages) == ("zeros", (first,), ("adapter",))
    assert (skipped.kind, skipped.tensors, skipped.stages) == ("skipped", (), ())
    stages = {stage.stage: stage for stage in kept.stages}
    assert list(stages) == ["base", "adapter", "merged"]
    assert (stages["base"].status, stages["base"].counts, stages["base"].worst_ratio) == ("equal", {"equal": 3}, None)
    assert (stages["adapter"].status, stages["adapter"].counts) == ("outside", {"outside": 3})
    assert stages["adapter"].first_bad == "model.layers.0.mlp"
    assert (stages["merged"].status, stages["merged"].worst_ratio) == ("within", 0.3)
    assert stages["merged"].worst_tensor == "merged::model.layers.0.mlp.lora_B"
    assert [worker.name for worker in kept.workers] == ALL


def test_nothing_of_the_comparison_is_kept() -> None:
    """A hundred comparisons would not fit in memory."""

    class Watched(list[object]):
        pass

    rows = Watched()
    found = msgspec.structs.replace(faulty(), tensors=tuple(faulty().tensors))
    found.tensors[0].outcomes[0].evidence["watched"] = rows
    gone = weakref.ref(rows)
    kept = summarize("x", "cases/x", found, 1.0)
    del rows, found
    gc.collect()
    assert gone() is None
    assert decode_json(encode_json(kept), CaseResult) == kept


def test_messages_of_causes_have_a_general_form() -> None:
    """Cases of different depth have the same one."""
    classes = [["cpu", "cuda:0", "cuda:2"], ["cuda:1"]]
    forms = set()
    for layers in (1, 2, 5):
        tensors = [tensor(classes, layer=f"layers.{i}", statuses={"cuda:1": "outside"}) for i in range(layers)]
        (finding,) = causes_of([*tensors, tensor([ALL], layer="layers.9")], next_step=lambda _: None)
        assert finding.general != finding.message
        forms.add(finding.general)
    assert forms == {"adapter · cuda:1 · zeros where the file is nonzero in lora_B tensors"}


def test_general_forms_have_no_sizes() -> None:
    """Adapters of different sizes pass through device 0 alike."""

    def touched(peak_bytes: int) -> str | None:
        row = Outcome(
            workers=("cuda:1",), reference=None, status="within", word=words.TOUCHED,
            evidence={"first_step": "load adapter", "peak_bytes": peak_bytes, "resident_bytes": 0},
        )  # fmt: skip
        made = msgspec.structs.replace(
            tensor([["cuda:1"]], stage="memory", layer="cuda:0", tensor="allocated"), rule="limit", outcomes=(row,)
        )
        (finding,) = find_device_use(ComparisonEvidence(tensors=[made]))
        assert str(peak_bytes // 1024) in finding.message
        return finding.general

    assert touched(256 * 1024) == touched(512 * 1024) is not None


def test_general_forms_of_facts_are_their_word() -> None:
    def third_copy(reason: str) -> str | None:
        row = Outcome(workers=("cuda:1",), reference=None, status="outside", word=THIRD_COPY, reason=reason)
        made = msgspec.structs.replace(
            tensor([["cuda:1"]], stage="memory", layer="layers.0", tensor="merge"), rule="limit", outcomes=(row,)
        )
        (finding,) = causes_of([made], next_step=lambda _: None)
        assert reason in finding.message
        return finding.general

    forms = {third_copy("a third copy of 64 MiB"), third_copy("a third copy of 8 MiB")}
    assert forms == {"memory · cuda:1 · a new weight allocated beside the old one and the delta"}
