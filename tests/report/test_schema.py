"""The written schema is that of the types, and reports are of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from benchmarks.report_schema import FILE, text
from consistency.report.json import as_bytes, schema
from tests.conftest import FinishedRun
from tests.report.made_comparisons import faulty
from tests.report.made_fleets import many
from tests.versions import made_with_constraints

REPORTS = {"small": faulty(), "fleet": many(10, 2, wrong=("node-0001:cuda:3",))}


def errors(report: dict[str, Any]) -> list[str]:
    """Return where a report is not of the schema."""
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema()).iter_errors(report)]


@made_with_constraints
def test_the_file_is_current() -> None:
    Draft202012Validator.check_schema(schema())
    assert FILE.read_text() == text(), "run: python -m benchmarks.report_schema --write"


@pytest.mark.parametrize("name", REPORTS)
def test_reports_are_of_the_schema(name: str) -> None:
    report = json.loads(as_bytes(REPORTS[name]))
    assert errors(report) == []
    broken = copy.deepcopy(report)
    broken["outcomes"][0]["status"] = "fine"
    assert errors(broken)


def test_a_real_report_is_of_the_schema(finished_run: FinishedRun) -> None:
    report = json.loads(Path(finished_run.folder, "report.json").read_text())
    assert errors(report) == []
