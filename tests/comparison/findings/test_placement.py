"""Facts with a limit in a comparison: nobody else owes them, and a touched device is one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from consistency.capture.records import TensorRecord
from consistency.comparison.by_worker import worst_error
from consistency.comparison.findings.workers import as_size
from consistency.comparison.result import Finding
from consistency.numerics import words
from consistency.numerics.real import Real
from consistency.stages.memory.spec import THIRD_COPY, WRONG_DEVICE
from tests.comparison.made_records import compared, computed
from tests.conftest import MakeCapture

MIB = 2**20


def fact(tensor: str = "allocated", layer: str = "cuda:0", **of: Any) -> TensorRecord:
    fields = {"stage": "memory", "layer": layer, "tensor": tensor, "rule": "limit", "status": "equal", **of}
    return TensorRecord(**fields)


def touched(*, kept: int = 0, **of: Any) -> TensorRecord:
    evidence = {
        "peak_bytes": 4 * MIB // 3, "resident_bytes": kept, "first_step": "load adapter", "passing_bytes": 3 * MIB,
        "first_operation": "aten._to_copy.default", "first_call": ["safetensors/torch.py:360 load_file"],
    }  # fmt: skip
    status = "outside" if kept else "within"
    return fact(**{"status": status, "word": words.TOUCHED, "evidence": evidence, "limit_ratio": Real(0.44), **of})


def about_devices(make_capture: MakeCapture, records: dict[str, list[TensorRecord]]) -> list[Finding]:
    return [f for f in compared(make_capture("a", records)).findings if f.kind == "touched"]


def test_what_passes_through_is_a_warning_that_says_how_to_avoid_it(make_capture: MakeCapture) -> None:
    found = compared(make_capture("a", {"cpu": [], "cuda:1": [touched()]}))
    assert found.verdict == "consistent"
    (finding,) = found.findings
    assert (finding.severity, finding.kind, finding.workers) == ("warning", "touched", ("cuda:1",))
    assert finding.message == (
        "memory · cuda:1 · loading the adapter allocated 1.3 MiB on cuda:0 and released it: give torch_device='cuda:1'"
    )
    assert finding.next == "PeftModel.from_pretrained(model, adapter, torch_device='cuda:1')"
    assert finding.detail == (
        "allocated · 1.3 MiB at peak, 0 B now · an adapter that passes through takes 3.0 MiB at most",
        "first: aten._to_copy.default in safetensors/torch.py:360 load_file",
    )


def test_what_stays_is_an_error(make_capture: MakeCapture) -> None:
    found = compared(make_capture("a", {"cpu": [], "cuda:1": [touched(kept=MIB)]}))
    assert found.verdict == "inconsistent"
    (finding,) = found.findings
    assert finding.severity == "error"
    assert finding.message == (
        "memory · cuda:1 · loading the adapter allocated 1.3 MiB on cuda:0, of which 1.0 MiB stay there"
    )


def test_workers_that_did_the_same_share_a_sentence(make_capture: MakeCapture) -> None:
    records: dict[str, list[TensorRecord]] = {f"cuda:{i}": [touched(), touched(tensor="reserved")] for i in (1, 2)}
    (finding,) = about_devices(make_capture, {"cuda:0": [fact(layer="cuda:1"), fact(layer="cuda:2")], **records})
    assert finding.workers == ("cuda:1", "cuda:2")
    assert finding.message.endswith("give torch_device= the device of the base")
    assert finding.tensors == ("memory::cuda:0.allocated", "memory::cuda:0.reserved")


def test_a_context_alone_is_said(make_capture: MakeCapture) -> None:
    evidence = {"seen_by": "NVML", "used_bytes": 2200 * MIB, "first_step": "load base"}
    (finding,) = about_devices(make_capture, {"cuda:1": [touched(tensor="context", evidence=evidence)]})
    assert finding.message == "memory · cuda:1 · loading the base opened a context on cuda:0"
    assert finding.detail == ("context · 2.1 GiB by NVML",)
    assert finding.next is None


@pytest.mark.parametrize("evidence", [{}, {"peak_bytes": "many", "first_call": 3, "first_operation": None}])
def test_evidence_from_elsewhere_is_not_relied_on(make_capture: MakeCapture, evidence: dict[str, Any]) -> None:
    (finding,) = about_devices(make_capture, {"cuda:1": [touched(evidence=evidence)]})
    assert "on cuda:0" in finding.message


def test_other_workers_owe_no_fact(make_capture: MakeCapture) -> None:
    """Each worker has other devices beside its own; what one cannot count another may."""
    cpu = [fact("merge_peak", "layers.0", status="within", limit_ratio=Real(0.5))]
    cuda = [fact("merge_peak", "layers.0", status="skipped", reason="counts no peak"), fact(layer="cuda:1")]
    info = {name: {"stages_done": ("memory",)} for name in ("cpu", "cuda:0")}
    found = compared(make_capture("a", {"cpu": cpu, "cuda:0": cuda}, info=info))
    assert found.verdict == "consistent"
    assert [(t.name, [(worker, r.status) for worker, r in t.by_worker()]) for t in found.tensors] == [
        ("memory::layers.0.merge_peak", [("cpu", "within"), ("cuda:0", "skipped")]),
        ("memory::cuda:1.allocated", [("cuda:0", "equal")]),
    ]
    (note,) = found.findings
    assert note.message == "memory · 1 check skipped on cuda:0: counts no peak"


def test_a_share_beyond_the_limit_is_outside_whatever_the_worker_says(make_capture: MakeCapture) -> None:
    peak = fact("merge_peak", "layers.0", status="within", limit_ratio=Real(1.5))
    assert compared(make_capture("a", {"cpu": [peak]})).verdict == "inconsistent"


def test_a_share_of_memory_is_no_share_of_a_numerical_bound(make_capture: MakeCapture) -> None:
    records = [computed(ratio=0.5), fact("merge_peak", "layers.0", status="within", limit_ratio=Real(0.9))]
    assert worst_error(compared(make_capture("a", {"cpu": records}))) == (0.5, "merged")


def test_a_merge_with_a_third_copy_says_how_much_it_took(make_capture: MakeCapture) -> None:
    evidence = {"layers": 2.0, "adding_peak_bytes": 200, "adding_allowed_bytes": 150}
    peak = fact(
        "merge_peak", "layers.0.q", status="outside", word=THIRD_COPY, limit_ratio=Real(1.333),
        evidence=evidence,
    )  # fmt: skip
    (finding,) = compared(make_capture("a", {"cpu": [peak]})).findings
    assert finding.message == (
        "memory · cpu · a new weight allocated beside the old one and the delta in merge_peak of layers.0.q"
    )
    assert finding.detail == (
        "layers.0.q.merge_peak · 1.333× the limit · peak is 2× the layer's weight"
        " · 200 bytes while the delta was added · 150 allowed",
    )


def test_adapter_tensors_elsewhere_are_counted_in_layers(make_capture: MakeCapture) -> None:
    evidence = {"got": {"lora_A": "meta"}, "wanted": "cpu"}
    wrong = {"status": "outside", "word": WRONG_DEVICE, "evidence": evidence}
    records = [fact("placement", f"layers.{i}", **(wrong if i < 2 else {})) for i in range(3)]
    (finding,) = compared(make_capture("a", {"cpu": records})).findings
    assert finding.message == (
        "memory · cpu · adapter tensors on a different device than their model in placement of 2 of 3 layers"
    )
    assert "got {'lora_A': 'meta'} · wanted cpu" in finding.detail[0]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (MIB, "1.0 MiB"), (3 << 30, "3.0 GiB"), ("?", "?")]
)
def test_sizes_are_for_people(value: Any, text: str) -> None:
    assert as_size(value) == text
