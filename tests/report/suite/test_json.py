"""`suite.json`: the fields that programs rely on."""

from __future__ import annotations

import json
import math
from typing import Any

from consistency.comparison.suite import SuiteResult
from consistency.report.formats import View
from consistency.report.suite.json import render
from tests.report.contract import no_constant
from tests.report.made_comparisons import ALL, comparison, tensor
from tests.report.suite.made_suites import case, good, many, suite


def written(found: SuiteResult) -> Any:
    return json.loads(b"".join(render(found, View())), parse_constant=no_constant)


def test_every_field_of_the_contract_is_there() -> None:
    table = written(many())
    assert table["schema"] == "consistency.suite/1"
    assert table["name"] == "nightly"
    assert table["created"] == "2026-03-01T02:00:00+00:00"
    assert (table["verdict"], table["exit_status"], table["simulated"]) == ("incomplete", 3, False)
    assert table["counts"] == {"incomplete": 1, "inconsistent": 57, "unchecked": 1, "consistent": 41}
    assert table["not_looked_at"] == ["a second run"]
    assert table["versions"] == {}, "nothing is known of cases made by hand"
    assert len(table["cases"]) == 100
    first = table["cases"][0]
    assert (first["name"], first["verdict"], first["elapsed_s"]) == ("lora-000", "inconsistent", 1.5)
    assert first["report"] == "cases/lora-000/report.json"
    assert first["findings"][0].keys() >= {"number", "kind", "severity", "message", "workers", "tensors"}
    assert first["stages"][0]["stage"] == "adapter"
    assert first["stages"][0]["workers"] == {"cpu": "equal", "cuda:0": "equal", "cuda:2": "equal", "cuda:1": "outside"}
    assert first["workers"][0].keys() >= {"name", "road", "status", "reason"}
    gone = next(one for one in table["cases"] if one["name"] == "gone")
    assert gone["report"] is None
    assert "no such folder for the adapter" in gone["error"]


def test_what_cases_have_in_common_is_there_once() -> None:
    first = written(many())["findings"][0]
    assert first["message"].startswith("56 of 100 cases · adapter · cuda:1 · zeros")
    assert len(first["cases"]) == len(first["numbers"]) == 56


def test_not_a_number_is_a_string() -> None:
    table = written(suite(case("x", comparison([tensor([ALL], ratio=math.nan)]))))
    assert table["cases"][0]["stages"][0]["worst_ratio"] == "nan"


def test_an_empty_findings_list_is_written() -> None:
    assert written(suite(case("x", good())))["findings"] == []
