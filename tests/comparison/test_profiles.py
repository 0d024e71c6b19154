"""What a profile promises: pinned settings repeat their bits; as deployed a change of bits is a fact, not a fault."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import pytest

from consistency.capture.records import SettingChange, TensorRecord
from consistency.case.profile import Switch
from consistency.comparison.findings import same_program
from consistency.comparison.result import Comparison, Finding
from tests.comparison.made_records import compared, computed, forward, moved, rounding
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
    finding = of_kind(found, "same-device-type")
    assert (finding.severity, found.verdict) == (severity, verdict)
    assert ("with --profile deployed equal bits are not promised" in finding.message) == bool(case)


@pytest.mark.parametrize(("case", "severity", "verdict"), BOTH)
@pytest.mark.parametrize("bits", [("b", "c"), ("b", "b")], ids=["no-majority", "one-is-odd"])
def test_what_a_profile_promises_does_not_hang_on_its_words(
    make_capture: MakeCapture, monkeypatch: pytest.MonkeyPatch, case: dict[str, str], severity: str, verdict: str,
    bits: tuple[str, str],
) -> None:  # fmt: skip
    monkeypatch.setattr(same_program, "AS_DEPLOYED", "")
    workers = {"cpu": [computed("a")], "cuda:0": [computed("x")]}
    workers |= {f"cuda:{number}": [computed(digest)] for number, digest in enumerate(bits, start=1)}
    same = {name: SAME["cuda:0"] for name in workers if name != "cpu"}
    found = compared(make_capture("a", workers, info=same, case=case))
    assert (of_kind(found, "same-device-type").severity, found.verdict) == (severity, verdict)


@pytest.mark.parametrize(("case", "severity", "verdict"), BOTH)
def test_bits_that_change_between_runs(
    make_capture: MakeCapture, case: dict[str, str], severity: str, verdict: str
) -> None:
    found = compared(make_capture("a", {"cpu": [computed("a", repeats=("b",))]}, case=case))
    finding = of_kind(found, "not-repeatable")
    assert (finding.severity, found.verdict) == (severity, verdict)
    (tensor,) = found.tensors
    assert [row.repeated for row in tensor.outcomes] == [False], "the fact stays in the report"


def test_moved_bytes_repeat_in_every_profile(make_capture: MakeCapture) -> None:
    found = compared(make_capture("a", {"cpu": [moved(repeats=("other",))]}, case=DEPLOYED))
    assert of_kind(found, "not-repeatable").severity == "error"


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


def test_the_next_command_has_a_stranger_s_setting_as_one_word(make_capture: MakeCapture) -> None:
    case: dict[str, Any] = {**DEPLOYED, "settings": (Switch(name="x;touch PWNED;", value=False),)}
    workers = {"cpu": [computed("a")], "cuda:0": [computed("b", ratio=3.0)]}
    (error,) = [f for f in compared(make_capture("a", workers, case=case)).findings if f.severity == "error"]
    words = shlex.split(str(error.next))
    assert words[words.index("--set") + 1] == "x;touch PWNED;=false"


# --- what rounding makes, by the precision of products ---------------------------------------------------------------

IN_BFLOAT16 = {"environment": {"products": {"matmul": "bfloat16"}}}


def statuses(found: Comparison) -> dict[str, str]:
    (tensor,) = found.tensors
    return {worker: row.status for worker, row in tensor.by_worker()}


def test_a_device_in_float32_is_not_excused_by_a_reference_in_bfloat16(make_capture: MakeCapture) -> None:
    """The reference worker's error is 1000 times as large by right; this worker's is not."""
    workers = {"cpu": [forward("a", 1e-3, rounding(1e-3))], "cpu@avx2": [forward("b", 1e-4, rounding(1e-7))]}
    found = compared(make_capture("a", workers, info={"cpu": IN_BFLOAT16}, case=DEPLOYED))
    assert statuses(found) == {"cpu": "within", "cpu@avx2": "outside"}


def test_a_device_in_bfloat16_has_the_error_of_its_own_products(make_capture: MakeCapture) -> None:
    workers = {
        "cpu": [forward("a", 1e-7)],
        "xpu:0": [forward("b", 1e-3, rounding(1e-3))],
        "xpu:1": [forward("c", 1e-2, rounding(1e-3))],
    }
    info = {"xpu:0": IN_BFLOAT16, "xpu:1": IN_BFLOAT16}
    found = compared(make_capture("a", workers, info=info, case=DEPLOYED))
    assert statuses(found) == {"cpu": "within", "xpu:0": "within", "xpu:1": "outside"}


def test_a_cpu_in_bfloat16_is_not_its_own_measure(make_capture: MakeCapture) -> None:
    found = compared(
        make_capture("a", {"cpu": [forward("a", 1e-2, rounding(1e-3))]}, info={"cpu": IN_BFLOAT16}, case=DEPLOYED)
    )
    assert statuses(found) == {"cpu": "outside"}


def test_without_an_error_that_fits_nothing_is_judged(make_capture: MakeCapture) -> None:
    record = msgspec.structs.replace(
        forward("b", 1e-3, None), reason="what rounding makes with such products is unknown"
    )
    workers = {"cpu": [forward("a", 1e-7, rounding(1e-7))], "xpu:0": [record]}
    found = compared(make_capture("a", workers, info={"xpu:0": IN_BFLOAT16}, case=DEPLOYED))
    assert statuses(found) == {"cpu": "within", "xpu:0": "skipped"}
    (note,) = [f for f in found.findings if f.kind == "skipped"]
    assert "what rounding makes with such products is unknown" in note.message


def test_a_merge_in_float32_is_not_judged_by_one_in_bfloat16(make_capture: MakeCapture) -> None:
    def merged(bits: str, error: float) -> TensorRecord:
        made = rounding(1e-3 if bits == "a" else 1e-7)
        return msgspec.structs.replace(forward(bits, error, made), stage="merged")

    workers = {"cpu": [merged("a", 1e-3)], "cpu@avx2": [merged("b", 1e-3)], "xpu:0": [merged("c", 1e-7)]}
    found = compared(make_capture("a", workers, info={"cpu": IN_BFLOAT16}, case=DEPLOYED))
    assert statuses(found) == {"cpu": "within", "cpu@avx2": "outside", "xpu:0": "within"}
