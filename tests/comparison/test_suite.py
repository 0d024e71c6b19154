"""Verdict, exit status and sentence of a suite, and the findings that its cases have in common."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from consistency.case.case import Case
from consistency.case.stages import HOST_STAGES, SPECS
from consistency.comparison.result import Finding
from consistency.comparison.suite import (
    CaseResult,
    CaseStage,
    SuiteResult,
    SuiteVerdict,
    common_findings,
    worst_first,
)
from consistency.errors import InputError


def found(name: str, verdict: SuiteVerdict = "consistent", *findings: Finding) -> CaseResult:
    return CaseResult(name=name, folder=f"cases/{name}", verdict=verdict, headline="so it is", findings=findings)


def finding(message: str = "zeros in 3 of 3 lora_B tensors", **fields: Any) -> Finding:
    plain: dict[str, Any] = {"kind": "zeros", "severity": "error", "general": "zeros in lora_B tensors"}
    return Finding(message=message, **{**plain, "workers": ("cuda:1",), **fields})


def suite(*cases: CaseResult) -> SuiteResult:
    return SuiteResult(name="nightly", cases=cases, elapsed_s=1.0)


@pytest.mark.parametrize(
    ("verdicts", "verdict", "status", "sentence"),
    [
        (["consistent"], "consistent", 0, "the case is consistent"),
        (["consistent"] * 3, "consistent", 0, "all 3 cases are consistent"),
        (["consistent", "inconsistent"], "inconsistent", 1, "1 of 2 cases is inconsistent and 1 is consistent"),
        (
            ["unchecked", "consistent", "consistent"],
            "unchecked",
            2,
            "1 of 3 cases could not be checked and 2 are consistent",
        ),
        (["unchecked", "inconsistent"], "inconsistent", 1, "1 of 2 cases is inconsistent and 1 could not be checked"),
        (
            ["incomplete", "unchecked", "inconsistent", "inconsistent", "consistent"],
            "incomplete",
            3,
            "1 of 5 cases is incomplete, 2 are inconsistent, 1 could not be checked and 1 is consistent",
        ),
        (["unchecked"], "unchecked", 2, "1 of 1 case could not be checked"),
        ([], "unchecked", 2, "no case was checked"),
    ],
)
def test_the_worst_case_decides(verdicts: list[SuiteVerdict], verdict: str, status: int, sentence: str) -> None:
    made = suite(*(found(f"case-{i}", each) for i, each in enumerate(verdicts)))
    assert (made.verdict, made.exit_status, made.sentence) == (verdict, status, sentence)


def test_worst_cases_come_first_and_keep_their_order() -> None:
    cases = [found("a"), found("b", "inconsistent"), found("c", "incomplete"), found("d", "inconsistent")]
    assert [case.name for case in worst_first(cases)] == ["c", "b", "d", "a"]


def test_one_cause_in_several_cases_is_one_finding() -> None:
    cases = [
        found("a", "inconsistent", finding("zeros in 3 of 3 lora_B tensors")),
        found("b", "inconsistent", finding("m", kind="memory", general="m"), finding("zeros in 5 of 5 lora_B tensors")),
        found("c", "inconsistent", finding("zeros in 3 of 3 lora_B tensors", workers=("cuda:2",))),
        found("d"),
    ]
    first, _, second = common_findings(cases)
    assert first.message == "2 of 4 cases · zeros in lora_B tensors"
    assert (first.cases, first.numbers, first.workers) == (("a", "b"), (1, 2), ("cuda:1",))
    assert second.message == "case c · zeros in 3 of 3 lora_B tensors"


def test_a_message_that_all_cases_share_is_kept_whole() -> None:
    cases = [found("a", "inconsistent", finding()), found("b", "inconsistent", finding()), found("c")]
    assert common_findings(cases)[0].message == "2 of 3 cases · zeros in 3 of 3 lora_B tensors"


def test_findings_of_one_case_stay_apart() -> None:
    """Two of them may be alike in general: the same word for two steps of a merge, say."""
    twice = (finding("first"), finding("second"))
    assert [each.message for each in common_findings([found("a", "inconsistent", *twice)])] == [
        "case a · first", "case a · second",
    ]  # fmt: skip
    both = common_findings([found(name, "inconsistent", *twice) for name in "ab"])
    assert [(each.message, each.numbers) for each in both] == [
        ("2 of 2 cases · first", (1, 1)), ("2 of 2 cases · second", (2, 2)),
    ]  # fmt: skip


def test_errors_come_before_warnings_of_more_cases() -> None:
    warning = finding("memory", kind="touched", severity="warning", general="memory")
    cases = [found("a", "consistent", warning), found("b", "inconsistent", warning, finding())]
    assert [(each.severity, len(each.cases)) for each in common_findings(cases)] == [("error", 1), ("warning", 2)]


def test_inputs_that_cannot_be_used_are_findings() -> None:
    error = InputError("no such folder for the adapter", where="./gone")
    cases = [CaseResult.of_error(name, f"cases/{name}", error) for name in "ab"]
    (only,) = common_findings([*cases, found("c")])
    assert only.message == "2 of 3 cases · could not be checked: no such folder for the adapter"
    assert only.detail == ("  where:  ./gone",)
    assert (only.kind, only.severity, only.numbers) == ("unchecked", "error", (0, 0))


def test_what_another_case_checks_is_not_left_out() -> None:
    """The stages of the host are those of the first case."""
    whole = Case(name="first", base="b", stages=tuple(SPECS))
    rest = tuple(stage for stage in SPECS if stage not in HOST_STAGES)
    other = Case(name="other", base="b", stages=rest, host_checked_by="first")
    texts = [case.not_checked() for case in (whole, other)]
    assert any("stage transfer" in text for text in texts[1])
    assert other.checked_elsewhere == dict.fromkeys(HOST_STAGES, "first")
    assert whole.checked_elsewhere == {}
    ran = tuple(CaseStage(stage=stage, status="equal", counts={"equal": 1}) for stage in ("transfer", "operators"))
    first = msgspec.structs.replace(found("first"), not_checked=texts[0], stages=ran)
    second = msgspec.structs.replace(found("other"), not_checked=texts[1])
    assert suite(first, second).not_checked == texts[0]
    assert "stage transfer (checked in case first)" in suite(second).not_checked, "the first case did not run"
    lost = msgspec.structs.replace(first, stages=())
    assert "stage transfer (checked in case first)" in suite(lost, second).not_checked, "it was lost before"
    only = suite(msgspec.structs.replace(found("a"), not_checked=("stage base",)), found("b"))
    assert only.not_checked == ("stage base",), "what one case alone leaves out is said"
