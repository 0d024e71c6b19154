from __future__ import annotations

from consistency.capture.records import TensorRecord
from tests.comparison.made_records import compared, digest, moved
from tests.conftest import MakeCapture


def settings(**evidence: object) -> TensorRecord:
    return TensorRecord(
        stage="adapter", layer="adapter_settings", tensor="rank_and_scaling", rule="peer", dtype="uint8",
        digest=digest("s"), status="measured", evidence=evidence,
    )  # fmt: skip


def test_another_base_is_a_note_and_ignored_fields_are_a_warning(make_capture: MakeCapture) -> None:
    said = settings(names_another_base="Qwen2, this one is llama", ignored_fields=["use_superlora"])
    found = compared(make_capture("a", {"cpu": [moved(), said], "cuda:0": [moved(), said]}))
    warning, note = found.findings
    assert (note.kind, note.severity, note.workers) == ("other-base", "note", ("cpu", "cuda:0"))
    assert "names another base: Qwen2, this one is llama" in note.message
    assert (warning.kind, warning.severity) == ("ignored-fields", "warning")
    assert "use_superlora" in warning.message
    assert found.verdict == "consistent"


def test_a_stranger_may_have_written_anything_there(make_capture: MakeCapture) -> None:
    said = settings(names_another_base={"a": 1}, ignored_fields="x")
    assert compared(make_capture("a", {"cpu": [moved(), said]})).verdict == "consistent"
