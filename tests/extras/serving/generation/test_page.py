"""What devices write, side by side in the page, and what of it a redacted report has."""

from __future__ import annotations

import re
from typing import Any

import pytest

from consistency.comparison.result import Outcome, TensorComparison
from consistency.extras.serving.generation.page import texts
from consistency.report.html import as_html
from consistency.report.redaction import redaction_of
from tests.report.made_comparisons import comparison

WRITTEN = [" a", " <b>", " c", " d"]


def prompt(*of_workers: tuple[str, dict[str, Any]]) -> TensorComparison:
    return TensorComparison(
        stage="generation", load_path="isolated", layer="prompt 0", tensor="text", shape=(), dtype="", rule="limit",
        classes=(),
        outcomes=tuple(
            Outcome(workers=(name,), reference=None, status="within", evidence=evidence)
            for name, evidence in of_workers
        ),
    )  # fmt: skip


SAME = {"written": WRITTEN, "near": [0.1, 0.5, 2.0, 0.0]}
OTHER = {**SAME, "written": [" a", " <b>", " x", " y"], "token": 2}
THREE = prompt(("cpu", SAME), ("cuda:0", OTHER), ("cuda:1", SAME))


def test_devices_with_the_same_text_share_a_line_and_the_parting_token_is_marked() -> None:
    (found,) = texts([THREE])
    assert found.texts == (((" a <b> c d", "", ""), ["cpu", "cuda:1"]), ((" a <b>", " x", " y"), ["cuda:0"]))
    page = as_html(comparison([THREE]))
    section = page[page.index('id="texts"') : page.index('id="workers"')]
    assert "<td> a &lt;b&gt;<mark> x</mark> y</td>" in section
    assert re.findall(r"height:([\d.]+)%", section) == ["10.0", "50.0", "100.0", "0.0"]
    assert section.count("f-bit") == 1, "one token may be either"


@pytest.mark.parametrize("evidence", [{}, {"written": "a"}, {"written": [1, None], "near": "x", "token": "2"}])
def test_a_stranger_may_have_written_anything(evidence: dict[str, Any]) -> None:
    assert as_html(comparison([prompt(("cpu", evidence))]))


def test_a_redacted_report_does_not_say_what_was_written() -> None:
    redacted = redaction_of({}).value({"evidence": SAME})
    assert redacted["evidence"] == {"written": ["…"] * 4, "near": SAME["near"]}
