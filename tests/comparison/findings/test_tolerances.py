"""Tolerances of the user's own in a run: planted faults found, let through, and what the report says of it."""

from __future__ import annotations

from typing import Any

import pytest

from consistency.capture.records import TensorRecord
from consistency.case.stage import Level
from consistency.case.tolerance import Override
from consistency.comparison.result import Comparison, Finding
from tests.comparison.made_records import compared, computed, errors, only_row
from tests.conftest import MakeCapture, RunSuiteWithFaults

FAULTY = "cpu@baseline"
QUICK: dict[str, Any] = {"stages": ("merged",), "level": Level.QUICK}

WIDE = Override(stage="merged", layer="*.q_proj", dtype="float32", atol=1e-3, rtol=1e-2)
WIDE_ON_ONE = Override(stage="merged", arch="baseline", atol=1e-3, rtol=1e-2)
CASES: dict[str, dict[str, Any]] = {
    "wide": {"tolerance": (WIDE,), **QUICK},
    "wide everywhere": {"tolerance": (Override(atol=1e-3, rtol=1e-2),), **QUICK},
    "wide on one architecture": {"tolerance": (WIDE_ON_ONE,), **QUICK},
    "nothing allowed": {"tolerance": (Override(stage="merged", atol=0.0, rtol=0.0),), **QUICK},
    "forward": {
        "tolerance": (
            Override(stage="forward", atol=0.0, rtol=0.0),
            Override(stage="forward", layer="model.*", atol=1e-2, rtol=1e-3),
            Override(stage="merged", atol=0.0, rtol=0.0),
        ),
        "stages": ("forward",),
    },
}  # fmt: skip
# `merge-off` multiplies every delta by 1.001: 1e-3 of it, or 5e-4 at most in these weights; `forward-off` every
# activation by 1.0001
PLANTED = {
    "wide": {FAULTY: "merge-off"},
    "wide everywhere": {FAULTY: "merge-off"},
    "wide on one architecture": {FAULTY: "merge-off", "cpu": "merge-off"},
    "forward": {FAULTY: "forward-off"},
}


def notes(comparison: Comparison) -> list[Finding]:
    return [f for f in comparison.findings if f.kind == "tolerance"]


# --- planted faults ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found_in(run_suite_with_faults: RunSuiteWithFaults) -> dict[str, Comparison]:
    return run_suite_with_faults(CASES, PLANTED)


@pytest.mark.slow
@pytest.mark.process
def test_a_fault_passes_where_the_user_allows_it_and_nowhere_else(found_in: dict[str, Comparison]) -> None:
    found = found_in["wide"]
    assert found.verdict == "inconsistent"
    (finding,) = errors(found)
    assert finding.workers == (FAULTY,)
    assert not any("q_proj" in name for name in finding.tensors)
    judged = [t for t in found.tensors if t.layer.endswith(".q_proj")]
    rest = [t for t in found.tensors if not t.layer.endswith(".q_proj")]
    assert len(judged) == 8
    assert len(rest) == len(finding.tensors) == 48
    assert {t.rule for t in judged} == {"user"}
    assert {t.rule for t in rest} == {"bound"}
    for tensor in judged:
        row = tensor.outcome(FAULTY)
        assert row is not None
        assert (row.status, row.reference, row.word) == ("within", "float64", None)
        assert row.evidence["tolerance"] == str(WIDE)
        assert 0 < float(row.ratio or 0) <= 1
    (note,) = notes(found)
    assert note.severity == "note"
    assert note.message.startswith(f"tolerance {WIDE}: 8 tensors judged by it")
    assert set(note.tensors) == {t.name for t in judged}

    everywhere = found_in["wide everywhere"]
    assert everywhere.verdict == "consistent"
    assert {t.rule for t in everywhere.tensors} == {"user"}


@pytest.mark.process
def test_a_fault_passes_on_the_architecture_that_the_user_allows_it_on_alone(found_in: dict[str, Comparison]) -> None:
    """Planted on two architectures, it stays an error on the other one."""
    found = found_in["wide on one architecture"]
    assert {worker for finding in errors(found) for worker in finding.workers} == {"cpu"}
    for tensor in found.tensors:
        allowed, other = tensor.outcome(FAULTY), tensor.outcome("cpu")
        assert allowed is not None
        assert other is not None
        assert (allowed.status, allowed.evidence["tolerance"]) == ("within", str(WIDE_ON_ONE))
        assert "tolerance" not in other.evidence
    (note,) = notes(found)
    assert note.workers == (FAULTY,)
    assert note.message.startswith("tolerance stage=merged,arch=baseline,atol=0.001,rtol=0.01: 56 tensors judged by it")


@pytest.mark.process
def test_nothing_allowed_puts_roundings_of_a_healthy_run_outside(found_in: dict[str, Comparison]) -> None:
    found = found_in["nothing allowed"]
    assert found.verdict == "inconsistent"
    rows = [
        row for t in found.tensors for worker, row in t.by_worker() if worker == FAULTY and float(row.max_abs or 0) > 0
    ]
    assert rows
    assert {row.status for row in rows} == {"outside"}
    assert {float(row.ratio or 0) for row in rows} == {float("inf")}
    assert "errors that exceed tolerance" in errors(found)[0].message
    assert "--tolerance stage=merged,atol=0.0,rtol=0.0" in (errors(found)[0].next or "")


@pytest.mark.process
def test_a_forward_pass_is_judged_by_what_is_given(found_in: dict[str, Comparison]) -> None:
    found = found_in["forward"]
    judged = [t for t in found.tensors if t.rule not in ("bitwise", "peer")]  # ids, masks, what blocks are given
    assert {t.rule for t in judged} == {"user"}
    rows = [(t, row) for t in judged for worker, row in t.by_worker() if worker == FAULTY and row.status != "equal"]
    statuses = {(t.layer == "logits", row.status) for t, row in rows}
    assert statuses == {(True, "outside"), (False, "within")}
    assert [n.message.partition(": ")[2] for n in notes(found)] == [
        "7 tensors judged by it instead of the derived bound",
        "87 tensors judged by it instead of the derived bound",
        "matched no tensor that was checked",
    ]


# --- what the report says, of captures made by hand -------------------------------------------------------------------

GIVEN = Override(stage="merged", layer="layers.*", atol=1e-3, rtol=0.0)


def judged(bits: str = "a", ratio: float = 0.5, by: Override = GIVEN, **changes: Any) -> TensorRecord:
    return computed(bits, ratio, **{"rule": "user", "tolerance": str(by), **changes})


@pytest.mark.parametrize(("ratio", "status"), [(1.0, "within"), (1.5, "outside"), (float("nan"), "outside")])
def test_a_row_is_what_its_worker_measured(make_capture: MakeCapture, ratio: float, status: str) -> None:
    workers = {"cpu": [judged()], "cuda:0": [judged("b", ratio)]}
    found = compared(make_capture("a", workers, case={"tolerance": (GIVEN,)}))
    assert only_row(found, "cuda:0").status == status
    assert found.tensors[0].rule == "user"


def test_a_tolerance_that_judged_nothing_is_named(make_capture: MakeCapture) -> None:
    misspelt = Override(layer="layer.*", atol=1.0, rtol=1.0)
    hidden = Override(layer="layers.0.*", atol=1.0, rtol=1.0)
    without = Override(stage="forward", atol=1.0, rtol=1.0)
    peer = computed("a", stage="forward", layer="logits", tensor="adapter_on", rule="peer", status="measured")
    case = {"tolerance": (misspelt, hidden, without, GIVEN)}
    found = compared(make_capture("a", {"cpu": [judged(), peer]}, case=case))
    assert {n.severity for n in notes(found)} == {"note"}
    assert [n.message for n in notes(found)] == [
        f"tolerance {GIVEN}: 1 tensor judged by it instead of the derived bound",
        f"tolerance {misspelt}: matched no tensor that was checked",
        f"tolerance {hidden}: judged no tensor: a later one wins where it matches (1 tensor)",
        f"tolerance {without}: judged no tensor: no float64 value is known where it matches (1 tensor)",
    ]
    assert found.verdict == "consistent"


def test_a_tolerance_for_an_architecture_that_is_not_there_is_named(make_capture: MakeCapture) -> None:
    elsewhere = Override(arch="sm_90", atol=1.0, rtol=1.0)
    info = {"cuda:0": {"architecture": "Ampere sm_86"}}
    capture = make_capture("a", {"cpu": [judged()], "cuda:0": [judged()]}, info=info, case={"tolerance": (elsewhere,)})
    assert f"tolerance {elsewhere}: matched no architecture that was checked: x86-64, Ampere sm_86" in {
        note.message for note in notes(compared(capture))
    }


def test_silence_of_lost_workers_is_no_misspelling(make_capture: MakeCapture) -> None:
    lost = {"cpu": {"status": "lost", "reason": "SIGKILL"}}
    found = compared(make_capture("a", {"cpu": []}, info=lost, case={"tolerance": (GIVEN,)}))
    assert notes(found) == []


def test_captures_with_different_tolerances_are_judged_by_their_own(make_capture: MakeCapture) -> None:
    given = make_capture("host-a", {"cpu": [judged(ratio=0.1)]}, case={"tolerance": (GIVEN,)})
    derived = make_capture("host-b", {"cpu": [computed("b", 7.0)]})
    found = compared(given, derived)
    assert only_row(found, "host-a:cpu").status == "within"
    assert only_row(found, "host-b:cpu").status == "outside"
    first, second = notes(found)
    assert first.message == (
        "the captures were made with different tolerances, and each row is judged by its own: "
        f"host-a:cpu: {GIVEN}; host-b:cpu: none"
    )
    assert second.workers == ("host-a:cpu",)
    assert found.tolerances == (GIVEN,)
    same = compared(given, make_capture("host-c", {"cpu": [judged()]}, case={"tolerance": (GIVEN,)}))
    assert len(notes(same)) == 1
