"""The cells of the tables: an error that no tensor shows marks its cell."""

from __future__ import annotations

import msgspec
import pytest

from consistency.comparison.result import Comparison, Finding, Severity, Verdict
from consistency.report.html import as_html
from consistency.report.markdown import as_markdown
from consistency.report.summary import by_architecture, rows_of, stages
from tests.report.made_comparisons import ALL, comparison, tensor
from tests.report.printed import printed


def drifted(severity: Severity = "error") -> Comparison:
    tensors = [tensor([ALL]), tensor([ALL], stage="merged", tensor="weight")]
    finding = Finding(
        kind="drift", severity=severity, message="drift · cuda:1 · 1 of 1 merged tensors differ", workers=("cuda:1",),
        tensors=("merged::layers.0.weight",),
    )  # fmt: skip
    verdict: Verdict = "inconsistent" if severity == "error" else "consistent"
    return comparison(tensors, verdict=verdict, findings=(finding,))


def test_a_drift_marks_its_cell_and_gives_its_device_a_line() -> None:
    (_, ampere) = by_architecture(rows_of(drifted(), "isolated"))
    assert [row.names for row in ampere] == [("cuda:0", "cuda:2"), ("cuda:1",)]
    assert stages(drifted()) == ["adapter", "merged"]
    assert [[cell.kind for cell in row.cells] for row in ampere] == [["equal", "equal"], ["equal", "flagged"]]
    assert ampere[1].cells[1].text == "drift"


def test_every_form_shows_the_mark_and_explains_it() -> None:
    text = printed(drifted())
    line = next(line for line in text.splitlines() if line.strip().startswith("cuda:1 "))
    assert line.split()[-2:] == ["≠", "drift"]
    assert "≠ within tolerance, but there is an error finding (drift, …)" in " ".join(text.split())
    assert "≠ drift" in as_markdown(drifted())
    assert 'class="mark k-flagged"' in as_html(drifted())


@pytest.mark.parametrize("severity", ["warning", "note"])
def test_only_an_error_marks_a_cell(severity: Severity) -> None:
    assert "≠" not in printed(drifted(severity)), "an accepted drift is a note"
    assert "≠" not in printed(comparison([tensor([ALL])]))


def test_an_error_that_another_load_path_shows_marks_no_cell_of_this_one() -> None:
    wrong = tensor([ALL], stage="merged", load_path="shared", statuses={"cuda:1": "outside"})
    found = drifted()
    found = msgspec.structs.replace(found, tensors=(*found.tensors, wrong), load_paths=("isolated", "shared"))
    (_, ampere) = by_architecture(rows_of(found, "isolated"))
    assert [[cell.kind for cell in row.cells] for row in ampere] == [["equal", "equal"]]
