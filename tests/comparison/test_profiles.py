"""What a profile promises: pinned settings repeat their bits; as deployed a change of bits is a fact, not a fault."""

from __future__ import annotations

from typing import Any

import pytest

from consistency.capture.records import SettingChange
from consistency.case.profile import Switch
from consistency.comparison.result import Comparison, Finding
from tests.comparison.made_records import compared, computed, moved
from tests.conftest import MakeCapture

DEPLOYED = {"profile": "deployed"}
SAME = {name: {"architecture": "A", "model": "M", "kernel_key": "same"} for name in ("cuda:0", "cuda:1")}
BOTH = [({}, "error", "inconsistent"), (DEPLOYED, "note", "consistent")]


def of_kind(found: Comparison, kind: str) -> Finding:
    (finding,) = [f for f in found.findings if f.kind == kind]
    return finding


@pytest.mark.parametrize(("case", "severity", "verdict"), BOTH)
def test_bits_of_one_model_that_differ(
    make_capture: MakeCapture, case: dict[str, str], severity: str, verdict: str
) -> None:
    workers = {"cpu": [computed("a")], "cuda:0": [computed("b")], "cuda:1": [computed("c")]}
    found = compared(make_capture("a", workers, info=SAME, case=case))
    finding = of_kind(found, "same-model")
    assert (finding.severity, found.verdict) == (severity, verdict)
    assert ("the profile deployed promises no equal bits" in finding.message) == bool(case)


@pytest.mark.parametrize(("case", "severity", "verdict"), BOTH)
def test_bits_that_change_between_runs(
    make_capture: MakeCapture, case: dict[str, str], severity: str, verdict: str
) -> None:
    found = compared(make_capture("a", {"cpu": [computed("a", repeats=("b",))]}, case=case))
    finding = of_kind(found, "not-repeatable")
    assert (finding.severity, found.verdict) == (severity, verdict)
    (tensor,) = found.tensors
    assert [row.repeated for row in tensor.rows] == [False], "the fact stays in the report"


def test_moved_bytes_repeat_in_every_profile(make_capture: MakeCapture) -> None:
    found = compared(make_capture("a", {"cpu": [moved(repeats=("other",))]}, case=DEPLOYED))
    assert of_kind(found, "not-repeatable").severity == "error"


def test_wrong_values_are_an_error_in_every_profile(make_capture: MakeCapture) -> None:
    workers = {"cpu": [computed("a")], "cuda:0": [computed("b", ratio=3.0)]}
    found = compared(make_capture("a", workers, case=DEPLOYED))
    assert found.verdict == "inconsistent"


def test_a_setting_that_nobody_asked_for_may_change(make_capture: MakeCapture) -> None:
    change: dict[str, Any] = {"setting": "matmul_allow_tf32", "in_force": True, "stage": "load base"}
    info = {"cpu": {"changes": (SettingChange(**change, asked=None),)}}
    found = compared(make_capture("a", {"cpu": [moved()]}, info=info, case=DEPLOYED))
    finding = of_kind(found, "setting-changed")
    assert finding.severity == "note"
    assert finding.message == "matmul_allow_tf32 changed to True during load base on cpu; the profile leaves it"


def test_a_chosen_setting_may_not(make_capture: MakeCapture) -> None:
    change: dict[str, Any] = {"setting": "matmul_allow_tf32", "in_force": True, "stage": "load base"}
    info = {"cpu": {"changes": (SettingChange(**change, asked=False),), "asked": {"matmul_allow_tf32": False}}}
    found = compared(make_capture("a", {"cpu": [moved()]}, info=info, case=DEPLOYED))
    assert of_kind(found, "setting-changed").severity == "warning"


def test_a_comparison_says_its_profile_and_what_was_chosen(make_capture: MakeCapture) -> None:
    plain = compared(make_capture("a", {"cpu": [moved()]}))
    assert (plain.profile, plain.settings) == ("pinned", ())
    case: dict[str, Any] = {**DEPLOYED, "settings": (Switch(name="cudnn_enabled", value=False),)}
    found = compared(make_capture("b", {"cpu": [moved()]}, case=case))
    assert (found.profile, found.settings) == ("deployed", ("cudnn_enabled=false",))


def test_captures_of_different_profiles_are_told_apart(make_capture: MakeCapture) -> None:
    found = compared(make_capture("a", {"cpu": [moved()]}), make_capture("b", {"cpu": [moved()]}, case=DEPLOYED))
    assert found.profile == "pinned and deployed"
    finding = of_kind(found, "environment")
    assert finding.message == "profile differs between workers: pinned: a:cpu; deployed: b:cpu"


def test_the_next_command_has_the_profile(make_capture: MakeCapture) -> None:
    case: dict[str, Any] = {**DEPLOYED, "settings": (Switch(name="cudnn_enabled", value=False),)}
    workers = {"cpu": [computed("a")], "cuda:0": [computed("b", ratio=3.0)]}
    (error,) = [f for f in compared(make_capture("a", workers, case=case)).findings if f.severity == "error"]
    assert "--profile deployed --set cudnn_enabled=false" in str(error.next)
