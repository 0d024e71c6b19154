from __future__ import annotations

from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.comparison.compare import compare
from consistency.comparison.result import Comparison
from tests.comparison.made_records import compared, computed, digest, moved
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


def test_experts_that_an_older_peft_saved_the_other_way_round_are_a_warning(make_capture: MakeCapture) -> None:
    said = settings(older_layout="PEFT 0.18.0 saved the experts of mlp.experts")
    (warning,) = compared(make_capture("a", {"cpu": [moved(), said]})).findings
    assert (warning.kind, warning.severity, warning.workers) == ("older-layout", "warning", ("cpu",))
    assert "PEFT 0.18.0 saved the experts of mlp.experts with lora_A and lora_B the other way round" in warning.message


def test_a_stranger_may_have_written_anything_there(make_capture: MakeCapture) -> None:
    said = settings(names_another_base={"a": 1}, ignored_fields="x")
    assert compared(make_capture("a", {"cpu": [moved(), said]})).verdict == "consistent"


def of(make_capture: MakeCapture, *configs: dict[str, object], **versions: str) -> Comparison:
    """Return the comparison of a host each with these configs of the base, on devices of one type."""
    captures = []
    for host, config in zip("abcd", configs, strict=False):
        environment = {"transformers": versions.get(host, "5")}
        info = {"cpu": {"config": config, "kernel_key": "k", "environment": environment}}
        bits = str(config)
        record = computed(bits, stage="base", rule="peer", buffer=True)
        name = f"{host}{len(versions)}"
        captures.append(read_capture(make_capture(name, {"cpu": [moved(), record]}, info=info, host=host)))
    return compare(captures)


def test_another_config_of_the_base_is_a_finding_and_its_consequences_accuse_no_device(
    make_capture: MakeCapture,
) -> None:
    """Each host was judged by its own config: consistent, or a device that differs from its like."""
    found = of(make_capture, {"rope_theta": 1e4, "n": 1}, {"rope_theta": 5e5, "n": 1})
    (finding,) = (one for one in found.findings if one.severity == "error")
    assert (finding.kind, finding.workers) == ("settings", ("b0:cpu",))
    assert finding.message.endswith("another config, so another function: rope_theta is 500000.0 and 10000.0 on a0:cpu")


def test_fields_that_one_version_of_transformers_alone_has_are_no_other_config(make_capture: MakeCapture) -> None:
    configs: tuple[dict[str, object], ...] = ({"rope_theta": 1e4}, {"rope_theta": 1e4, "new": 1})
    assert any(one.kind == "settings" for one in of(make_capture, *configs).findings)
    assert not any(one.kind == "settings" for one in of(make_capture, *configs, b="6").findings)


def test_captures_without_a_config_and_equal_ones_say_nothing(make_capture: MakeCapture) -> None:
    assert of(make_capture, {}, {}, {"n": 1}, {"n": 1}).verdict == "consistent"
