"""Why a result is not consistent, in the lines of an assertion."""

from __future__ import annotations

from pathlib import Path

import pytest

import consistency
from consistency.comparison.result import Finding, Verdict
from consistency.comparison.suite import CaseResult, SuiteResult
from consistency.report.findings import problems
from consistency.workflows.pipeline import Report
from tests.report.made_comparisons import ALL, comparison, tensor

ZEROS = Finding(
    kind="zeros", severity="error", message="adapter · cuda:1 · zeros in lora_B of layers.0", workers=("cuda:1",),
    tensors=("adapter::layers.0.lora_B",), detail=("layers.0.lora_B[1, 2] · got 0, wanted 1",), next="look",
)  # fmt: skip
OTHER = Finding(kind="inputs", severity="error", message="forward · other inputs", tensors=("forward::a", "forward::b"))
WARNING = Finding(kind="ecc", severity="warning", message="not part of it")
FOUND = comparison([tensor([ALL])], verdict="inconsistent", findings=(ZEROS, WARNING))


def test_one_finding_is_said_once() -> None:
    assert list(problems(FOUND)) == [
        "inconsistent: adapter · cuda:1 · zeros in lora_B of layers.0",
        "     layers.0.lora_B[1, 2] · got 0, wanted 1",
        "     next: look",
    ]


def test_several_findings_are_numbered_and_all_counted() -> None:
    found = list(problems(comparison([], verdict="inconsistent", findings=(ZEROS, *[OTHER] * 11))))
    assert found[0] == "inconsistent: adapter · cuda:1 · zeros in lora_B of layers.0 (and 11 other findings)"
    assert found[1] == "  1  adapter · cuda:1 · zeros in lora_B of layers.0"
    assert found[4:7] == ["  2  forward · other inputs", "     forward::a", "     forward::b"]
    assert found[-1] == "  and 2 more"


@pytest.mark.parametrize("verdict", ["inconsistent", "incomplete"])
def test_what_is_not_consistent_is_raised(verdict: Verdict) -> None:
    found = comparison([tensor([ALL])], verdict=verdict, findings=(ZEROS,))
    for report in (found, Report(comparison=found, folder=None, elapsed_s=0.0)):
        with pytest.raises(AssertionError) as raised:
            consistency.assert_consistent(report)
        assert str(raised.value) == "\n".join(problems(found))
    good = comparison([tensor([ALL])], findings=(WARNING,))
    consistency.assert_consistent(good)
    consistency.assert_consistent(Report(comparison=good, folder=Path(), elapsed_s=0.0))


def test_a_suite_names_its_cases() -> None:
    bad = CaseResult(name="b", folder="b", verdict="inconsistent", headline="adapter · cuda:1 · zeros")
    cases = (CaseResult(name="a", folder="a", verdict="consistent", headline="all match"), bad)
    with pytest.raises(AssertionError) as raised:
        consistency.assert_consistent(SuiteResult(name="night", cases=cases, elapsed_s=1.0))
    assert str(raised.value).splitlines() == [
        "inconsistent: 1 of 2 cases is inconsistent and 1 is consistent", "  b: inconsistent: adapter · cuda:1 · zeros",
    ]  # fmt: skip


def test_the_text_of_a_result_has_verdict_tensor_device_and_cause() -> None:
    wanted = "llama: inconsistent; adapter::layers.0.lora_B; adapter · cuda:1 · zeros in lora_B of layers.0>"
    assert repr(FOUND) == f"<Comparison {wanted}"
    assert repr(Report(comparison=FOUND, folder=None, elapsed_s=0.0)) == f"<Report {wanted}"
    assert repr(comparison([], findings=(WARNING,))) == "<Comparison llama: consistent>"
    several = repr(comparison([], verdict="inconsistent", findings=(ZEROS, OTHER)))
    assert several.endswith("zeros in lora_B of layers.0; and 1 more>")
