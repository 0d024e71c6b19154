"""`suite.json`: the fields that programs rely on."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from consistency.comparison.result import Status
from consistency.comparison.suite import CaseResult, SuiteResult
from consistency.report.formats import View
from consistency.report.json import render
from tests.report.contract import no_constant
from tests.report.made_comparisons import ALL, comparison, tensor
from tests.report.made_suites import case, good, suite


def written(found: SuiteResult) -> Any:
    return json.loads(b"".join(render(found, View())), parse_constant=no_constant)


def test_every_field_of_the_contract_is_there() -> None:
    outside: dict[str, Status] = dict.fromkeys(ALL, "outside")
    table = written(suite(case("x", comparison([tensor([ALL], ratio=math.nan, statuses=outside)]))))
    assert table["cases"][0]["stages"][0]["worst_ratio"] == "nan"


def test_a_case_names_the_case_that_has_a_stage_in_its_place() -> None:
    kept = case("x", comparison([tensor([ALL])], checked_elsewhere={"operators": "first"}))
    (table,) = written(suite(kept))["cases"]
    assert table["checked_elsewhere"] == {"operators": "first"}
    del table["checked_elsewhere"]  # as versions before this field wrote it
    assert msgspec.convert(table, CaseResult).checked_elsewhere == {}


def test_an_empty_findings_list_is_written() -> None:
    assert written(suite(case("x", good())))["findings"] == []
