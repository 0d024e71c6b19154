"""Findings of soaks that were recorded by hand."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from consistency.capture.soak import (
    MOST_NUMBERS,
    ChangedTensor,
    Condition,
    Load,
    Occurrences,
    Soak,
    SoakedStage,
)
from consistency.comparison.findings import repeats
from consistency.comparison.findings.repeats import AS_DEPLOYED, readings_text
from consistency.comparison.result import Comparison
from consistency.numerics import words
from consistency.report.sentences import soak_texts
from tests.comparison.made_records import compared, computed, errors, measured, moved
from tests.conftest import MakeCapture

HOT = Condition(
    at="2026-01-01T01:00:00Z",
    repeat=50,
    readings={"temperature_c": 91, "power_w": 698.5, "throttle_reasons": ["power cap"], "ecc corrected, since boot": 2},
)


def occurrences(*numbers: int, count: int | None = None) -> Occurrences:
    return Occurrences(count=count or len(numbers), numbers=numbers, first_at="01:00:00", last_at="01:30:00")


def change(stage: str = "merged", tensor: str = "weight", *numbers: int, **fields: Any) -> ChangedTensor:
    given = {
        "returned": True, "word": words.BIT_FLIP, "evidence": {"bits": [27], "fields": ["exponent"]},
        "measure": measured(mismatched=1), "condition": HOT,
    }  # fmt: skip
    place = {"stage": stage, "layer": "layers.0.q", "tensor": tensor, "occurrences": occurrences(*(numbers or (50,)))}
    return ChangedTensor(**{**place, **given, **fields})


def soak(*changes: ChangedTensor, repeats: int = 1234, **fields: Any) -> Soak:
    stages = {one.stage: one.occurrences for one in changes}
    told = tuple(
        SoakedStage(
            stage=stage, tensors=3, repeats=repeats, changed=changed,
            changed_tensors=sum(one.stage == stage for one in changes),
        )
        for stage, changed in stages.items()
    )  # fmt: skip
    given = {"asked_s": 600.0, "elapsed_s": 600.0, "repeats": repeats, "complete": True, "stages": told}
    return Soak(**{**given, "changed": changes[0].occurrences if changes else None, "changes": changes, **fields})


@pytest.fixture
def comparison_of(make_capture: MakeCapture) -> Any:
    count = itertools.count()

    def of(found: Soak, **case: Any) -> Comparison:
        records = {name: [moved(), computed()] for name in ("cpu", "cuda:0")}
        info = {"cuda:0": {"soak": found}}
        return compared(make_capture(f"a{next(count)}", records, info=info, case={"soak_s": 600.0, **case}))

    return of


def test_a_soak_without_a_change_is_no_finding(comparison_of: Any) -> None:
    found = comparison_of(soak())
    assert (found.verdict, found.findings) == ("consistent", ())
    assert soak_texts(found) == ["soak: 1234 repeats in 10m, none differs"]


def test_an_intermittent_fault_is_told_as_k_of_n(comparison_of: Any) -> None:
    found = comparison_of(soak(change("merged", "weight", 50, 100, 150)))
    (finding,) = errors(found)
    assert finding.kind == "not-repeatable"
    assert finding.message == (
        "merged · cuda:0 · single-bit flips in weight of layers.0.q in 3 of 1234 repeats, the same wrong bits each "
        "time, and right in between"
    )
    assert finding.tensors == ("merged::layers.0.q.weight",)
    assert finding.detail[0] == "in repeats 50, 100, 150: 01:00:00 to 01:30:00"
    assert "bit 27 (exponent)" in finding.detail[1]
    assert finding.detail[2] == "in repeat 50: 91 °C, 698.5 W, throttled: power cap, ecc corrected, since boot: 2"
    assert finding.next is not None
    assert finding.next.endswith("--devices cpu,cuda:0 --for 10m")
    rows = {(t.name, worker): row.repeated for t in found.tensors for worker, row in t.by_worker()}
    assert rows["merged::layers.0.q.weight", "cuda:0"] is False
    assert rows["merged::layers.0.q.weight", "cpu"] is None
    assert soak_texts(found) == ["soak: 1234 repeats in 10m, 3 of 1234 differ"]


@pytest.mark.parametrize(
    ("changed", "repeats", "ending"),
    [
        (change("merged", "weight", 7), 10, "in 1 of 10 repeats, right again afterwards"),
        (change("merged", "weight", 7, 8, returned=False), 8, "in 2 of 8 repeats, from repeat 7 on"),
        (change("merged", "weight", 2, 4, values=2), 9, "different wrong bits each time, and right in between"),
        (
            change("merged", "weight", 1, 2, returned=False), 2,
            "all repeats agree with each other, but not with the first run",
        ),
    ],
)  # fmt: skip
def test_transient_and_permanent_changes_are_told_apart(
    comparison_of: Any, changed: ChangedTensor, repeats: int, ending: str
) -> None:
    (finding,) = errors(comparison_of(soak(changed, repeats=repeats)))
    assert finding.message.endswith(ending)


TWO_TENSORS = (  # they change in turn, so that something differs in every repeat, and yet each comes back
    change("merged", "weight", 1, 3), change("merged", "delta", 2, 4),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "ending"),
    [
        (TWO_TENSORS, "in 4 of 4 repeats, the same wrong bits each time, and right in between"),
        (
            (TWO_TENSORS[0], change("merged", "delta", 2, 4, values=2)),
            "in 4 of 4 repeats, different wrong bits each time, and right in between",
        ),
        (
            (TWO_TENSORS[0], change("merged", "delta", 2, 4, returned=False)),
            "in 4 of 4 repeats, the same wrong bits each time, and right in between",
        ),
        (
            (change("merged", "weight", 1, 2, 3, 4, returned=False, values=3),),
            "in 4 of 4 repeats, from repeat 1 on",
        ),
        ((change("merged", "weight", 1, 2, 3, 4),), "the same wrong bits each time, and right in between"),
    ],
)
def test_a_course_is_that_of_all_tensors(comparison_of: Any, changes: tuple[ChangedTensor, ...], ending: str) -> None:
    numbers = sorted({number for one in changes for number in one.occurrences.numbers})
    stage = SoakedStage(
        stage="merged", tensors=3, repeats=4, changed=occurrences(*numbers), changed_tensors=len(changes)
    )
    (finding,) = errors(comparison_of(soak(*changes, repeats=4, stages=(stage,))))
    assert finding.message.endswith(ending)


def test_more_tensors_than_are_stored_are_counted(comparison_of: Any) -> None:
    one = change()
    stage = SoakedStage(stage="merged", tensors=99, repeats=9, changed=one.occurrences, changed_tensors=40)
    (many,) = errors(comparison_of(soak(one, stages=(stage,))))
    assert "single-bit flips in 40 tensors in 1 of" in many.message
    (two,) = errors(comparison_of(soak(*TWO_TENSORS)))
    assert "single-bit flips in 2 tensors in" in two.message


def test_a_change_without_a_diagnosis_is_only_told(comparison_of: Any) -> None:
    for word in (None, words.DIFFERS):
        (finding,) = errors(comparison_of(soak(change(word=word))))
        assert "merged · cuda:0 · weight of layers.0.q changed in 1 of" in finding.message


def test_many_repeats_and_tensors_are_cut_and_counted(comparison_of: Any) -> None:
    numbers = range(1, MOST_NUMBERS + 1)
    changes = [change("merged", f"weight_{i}", *numbers, occurrences=occurrences(*numbers, count=53)) for i in range(5)]
    (finding,) = errors(comparison_of(soak(*changes)))
    assert finding.detail[0].endswith("19, 20, and 33 more: 01:00:00 to 01:30:00")
    assert len(finding.detail) == 1 + 3 + 1, "when, the first three tensors, and what the device reported"
    (once,) = errors(comparison_of(soak(change("merged", "weight", 7))))
    assert once.detail[0] == "in repeat 7: 01:00:00"


@pytest.mark.parametrize("condition", [None, Condition(at="01:00:00", repeat=50, readings={})])
def test_without_readings_the_reason_is_told(comparison_of: Any, condition: Condition | None) -> None:
    found = soak(change(condition=condition), unread="NVIDIA's management library does not answer")
    (finding,) = errors(comparison_of(found))
    assert finding.detail[-1] == "no readings of the device: NVIDIA's management library does not answer"


def test_readings_that_tell_nothing_are_left_out() -> None:
    readings = {
        "temperature_c": 40, "throttle_reasons": [], "power_limit_w": 700.0, "utilization_percent": 99,
        "ecc corrected, since boot": 0, "ecc uncorrected, since boot": 3,
    }  # fmt: skip
    text = readings_text(Condition(at="01:00:00", repeat=1, readings=readings))
    assert text == "40 °C, ecc uncorrected, since boot: 3"


def test_a_finding_has_the_tensors_of_its_own_stage(comparison_of: Any) -> None:
    found = errors(comparison_of(soak(change("merged", "weight", 3), change("adapter", "lora_B", 7))))
    assert [finding.tensors for finding in found] == [
        ("merged::layers.0.q.weight",),
        ("adapter::layers.0.q.lora_B",),
    ]


@pytest.mark.parametrize(
    ("base", "computed_with"),
    [
        (change("base", "weight", 5), change("merged", "weight", 5, 6)),
        (change("base", "weight", 7), change("merged", "weight", 5)),
        (
            change("base", "weight", occurrences=Occurrences(count=3, numbers=(), first_at="1", last_at="2")),
            change("merged", "weight", occurrences=Occurrences(count=3, numbers=(), first_at="1", last_at="2")),
        ),
    ],
    ids=["less often", "later", "at unknown times"],
)
def test_weights_that_changed_less_often_or_later_are_no_cause(
    comparison_of: Any, base: ChangedTensor, computed_with: ChangedTensor
) -> None:
    assert not any("caused" in finding.message for finding in errors(comparison_of(soak(base, computed_with))))


def test_what_was_computed_with_changed_weights_has_their_cause(comparison_of: Any) -> None:
    stays = {"returned": False}
    base, merged = change("base", "weight", 5, 6, **stays), change("merged", "weight", 5, 6, **stays)
    first, second = errors(comparison_of(soak(base, merged, repeats=6)))
    assert "caused" not in first.message
    assert second.message.endswith("from repeat 5 on: caused by the changed bytes of base")


def test_as_deployed_only_moved_bytes_are_promised(comparison_of: Any) -> None:
    found = comparison_of(soak(change(), change("adapter", "lora_B")), profile="deployed")
    severities = {f.message.split(" ")[0]: f.severity for f in found.findings if f.kind == "not-repeatable"}
    assert severities == {"merged": "note", "adapter": "error"}
    note = next(f for f in found.findings if f.severity == "note" and f.kind == "not-repeatable")
    assert all(text is not None and text.endswith(AS_DEPLOYED) for text in (note.message, note.general))
    assert not any(AS_DEPLOYED in finding.message for finding in errors(found))


def test_what_the_soak_of_a_profile_promises_does_not_hang_on_its_words(
    comparison_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "AS_DEPLOYED", "")
    found = comparison_of(soak(change()), profile="deployed")
    assert [f.severity for f in found.findings if f.kind == "not-repeatable"] == ["note"]


def test_only_memory_that_grows_all_the_time_and_by_more_than_is_allowed_is_told(comparison_of: Any) -> None:
    def told(*memory: int) -> list[str]:
        found = comparison_of(soak(memory_bytes=tuple(m << 20 for m in memory), memory_allowed_bytes=64 << 20))
        return [f.message for f in found.findings if f.kind == "memory-growth" and f.severity == "warning"]

    (message,) = told(100, 130, 160, 190, 220)
    assert "memory grew by 120 MiB over 1234 repeats" in message
    assert not told(100, 110, 120, 130, 140)
    assert not told(100, 190, 190, 190, 190)  # what a library keeps
    assert not told(100, 300)  # one step is no course
    assert not told(100)
    assert not told()


def test_a_lost_worker_and_a_load_that_ended_are_said(comparison_of: Any) -> None:
    load = Load(size="64 × 64", products=5, error="the load ended: no room")
    found = comparison_of(soak(complete=False, repeats=731, load=load))
    assert soak_texts(found) == [
        "soak under load: 731 repeats in 10m, none differs", "cuda:0 was lost during it",
        "cuda:0: the load ended: no room",
    ]  # fmt: skip


def test_what_the_soak_left_out_is_said(comparison_of: Any) -> None:
    left = (SoakedStage(stage="memory", reason="it states facts, which are checked once"),)
    assert "memory during the soak" in comparison_of(soak(stages=left)).not_checked


def test_a_stage_that_another_worker_repeated_is_not_called_left_out(make_capture: MakeCapture) -> None:
    """A worker may have nothing to repeat in a stage, as the CPU in copies between devices."""
    nothing = SoakedStage(stage="transfer", reason="the first run compared nothing of it")
    repeated = SoakedStage(stage="transfer", tensors=3, repeats=5)

    def not_checked(name: str, *stages: SoakedStage) -> list[str]:
        info = {worker: {"soak": soak(stages=(one,))} for worker, one in zip(("cpu", "cuda:0"), stages, strict=True)}
        records = {"cpu": [moved()], "cuda:0": [moved()]}
        found = compared(make_capture(name, records, info=info, case={"soak_s": 600.0}))
        return [text for text in found.not_checked if text.endswith("during the soak")]

    assert not_checked("one", nothing, repeated) == []
    assert not_checked("none", nothing, nothing) == ["transfer during the soak"]


def test_changes_after_an_operation_without_a_deterministic_version_are_a_note(make_capture: MakeCapture) -> None:
    reached = computed(layer="layers.1.q", nondeterministic=("cumsum_cuda_kernel",))
    records = {name: [moved(), computed(), reached] for name in ("cpu", "cuda:0")}

    def found(name: str, *changes: ChangedTensor) -> Comparison:
        return compared(make_capture(name, records, info={"cuda:0": {"soak": soak(*changes)}}, case={"soak_s": 600.0}))

    after = msgspec.structs.replace(change(), layer="layers.1.q")
    (note,) = [f for f in found("after", after).findings if f.kind == "not-repeatable"]
    assert note.severity == "note"
    assert note.message.endswith(": torch has no deterministic version of cumsum_cuda_kernel, which ran before")
    (error,) = errors(found("before", change(), after))
    assert "deterministic" not in error.message
