"""`suite.md`: short, and safe to paste."""

from __future__ import annotations

import re

import pytest

from tests.report.made_comparisons import HOSTILE, hostile
from tests.report.made_suites import case, good, many, suite, zeros
from tests.report.printed import suite_as_markdown, visible


@pytest.mark.parametrize("count", [1, 19, 20, 21, 300])
def test_a_screen_is_visible_for_any_number_of_cases(count: int) -> None:
    cases = [case(f"{i}", zeros(1 + i)) if i % 2 else case(f"{i}", hostile()) for i in range(min(count, 40))]
    cases += [case(f"more-{i}", good()) for i in range(count - len(cases))]
    assert len(visible(suite_as_markdown(suite(*cases), "run"))) < 60
    assert len(visible(suite_as_markdown(many(), "run"))) < 60


def test_hostile_names_stay_text() -> None:
    text = suite_as_markdown(suite(case(HOSTILE, hostile()), case("`|` @you", good())))
    outside = "".join(text.split("```")[::2])
    assert not re.search(r"(?<!\\)<(?!/?details>|/?summary>)", outside), "every other < is escaped"
    assert "@you" not in outside
    assert "\\`\\|\\`" in outside
