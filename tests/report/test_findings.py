"""What is shown of a finding: its own evidence, and the commands that can be typed next."""

from __future__ import annotations

import msgspec
import pytest

from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.case.stage import Stage
from consistency.case.stages import stages_of
from consistency.comparison.compare import compare
from consistency.comparison.result import Finding
from consistency.numerics import words
from consistency.numerics.rules import Rule
from consistency.report.findings import findings_of
from tests.comparison.made_records import computed, digest, moved
from tests.conftest import MakeCapture
from tests.report.made_comparisons import faulty


@pytest.mark.parametrize("stage", stages_of(lambda spec: spec.together))
def test_what_ranks_find_together_is_to_be_bisected(make_capture: MakeCapture, stage: Stage) -> None:
    """No one device can show it again."""
    right = TensorRecord(rule="limit", status="equal", stage=stage, layer="layer", tensor="float32 1")
    wrong = msgspec.structs.replace(right, status="outside", word=words.DIFFERS)
    folder = make_capture("a", {"cpu": [right], "cpu@baseline": [wrong]})
    (finding,) = (one for one in findings_of(compare([read_capture(folder)]), "out") if one.severity == "error")
    assert finding.workers == ("cpu@baseline",)
    assert finding.next == "consistency bisect out --finding 1 --base base --adapter adapter"


def shown(make_capture: MakeCapture, *records: TensorRecord, right: tuple[TensorRecord, ...] = ()) -> Finding:
    """Return the first finding of a second worker with these records, as a report in `out` shows it."""
    folder = make_capture("a", {"cpu": right, "cpu@baseline": records})
    return findings_of(compare([read_capture(folder)]), "out")[0]


WRONG = computed(ratio=3.0, layer="layers.1.q")


def test_evidence_and_commands_are_of_the_finding_and_not_of_what_it_leads_to(make_capture: MakeCapture) -> None:
    """The weight computed from other settings was named as the worst of them, and the reproducer had no tensor."""
    settings = TensorRecord(
        rule="peer", status="outside", stage="adapter", layer="adapter_settings", tensor="rank_and_scaling",
        word=words.SETTINGS, digest=digest("a"), evidence={"got": {"scaling 4": 2}, "wanted": {"scaling 2": 2}},
    )  # fmt: skip
    right = msgspec.structs.replace(settings, status="measured", word=None)
    finding = shown(make_capture, settings, WRONG, right=(right, computed(layer="layers.1.q")))
    assert finding.detail[0].startswith("adapter_settings.rank_and_scaling")
    *others, led_to = finding.detail
    assert led_to.startswith("leads to: merged")
    assert not any("layers.1.q" in line or "which setting" in line for line in others)
    assert finding.next == "consistency run --base base --adapter adapter --devices cpu,cpu@baseline --repeat 2"


def test_a_run_with_repeats_is_not_to_be_repeated(make_capture: MakeCapture) -> None:
    folder = make_capture("a", {"cpu": (computed(layer="layers.1.q"),), "cpu@baseline": (WRONG,)})
    found = compare([read_capture(folder)])
    for command, times in {("consistency", "run"): 1, ("consistency", "run", "--repeat", "2"): 0}.items():
        detail = findings_of(msgspec.structs.replace(found, command=command), "out")[0].detail
        assert sum(line.startswith("again: ") for line in detail) == times


def test_an_engines_outputs_are_not_bisected(make_capture: MakeCapture) -> None:
    """There is no device `part:0` on which a setting could be changed: the engine writes its outputs again."""
    folder = make_capture("a", {"cpu": (computed(layer="layers.1.q"),), "cpu@baseline": (WRONG,)})
    found = compare([read_capture(folder)])
    write_again = "consistency inputs --base base --out inputs.safetensors, and let the engine write part again"
    findings = tuple(msgspec.structs.replace(one, next=write_again) for one in found.findings)
    detail = findings_of(msgspec.structs.replace(found, findings=findings), "out")[0].detail
    assert f"again: {write_again}" in detail
    assert not any("bisect" in line for line in detail)


def test_bytes_that_were_not_stored_are_bisected(make_capture: MakeCapture) -> None:
    lost = moved(held="b", stage="base", measure=None, word=words.DIFFERS)
    finding = shown(make_capture, lost, WRONG, right=(moved(stage="base"), computed(layer="layers.1.q")))
    assert finding.next == "consistency bisect out --finding 1 --base base --adapter adapter"


@pytest.mark.parametrize(("rule", "shown"), [("peer", "run"), ("bitwise", "reproduce")])
def test_what_workers_are_compared_in_with_each_other_is_not_reproduced(rule: Rule, shown: str) -> None:
    """`reproduce` had no tensor of a projection that each worker makes anew, and named itself as the way out."""
    plain = faulty()
    tensors = tuple(msgspec.structs.replace(one, rule=rule) for one in plain.tensors)
    (finding, *_) = findings_of(msgspec.structs.replace(plain, tensors=tensors), "out")
    assert str(finding.next).startswith(
        ("consistency run", "consistency bisect") if shown == "run" else f"consistency {shown}"
    )


def test_a_bisection_is_allowed_what_the_case_names(make_capture: MakeCapture) -> None:
    finding = shown(make_capture, WRONG, right=(computed(layer="layers.1.q"),))
    setting = "which setting: consistency bisect out --finding 1 --base base --adapter adapter"
    assert setting in finding.detail
    assert finding.next == "consistency reproduce out --finding 1 --out repro"
