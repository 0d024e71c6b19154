"""The reason beside a bare `assert report.verdict == "consistent"`.

pytest shows the two words that were compared. The reports that fixtures have given to the test say what they stand for.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest

from consistency.comparison.result import Comparison, Verdict
from consistency.report.findings import problems

_NAME = "consistency-reasons"


def show_reason(config: pytest.Config, comparison: Comparison) -> None:
    """Have pytest show why this comparison is not consistent, where an assertion of the same test fails on it."""
    if comparison.verdict != "consistent":
        reasons = config.pluginmanager.get_plugin(_NAME)
        if reasons is None:
            reasons = _Reasons()
            config.pluginmanager.register(reasons, _NAME)
        reasons.of_test.append((comparison.verdict, list(problems(comparison))))


class _Reasons:
    """A plugin that is registered when a fixture has given out the first report that is not consistent."""

    def __init__(self) -> None:
        self.of_test: list[tuple[str, list[str]]] = []

    def pytest_runtest_logfinish(self) -> None:
        """Forget the reports of a test when it ends."""
        self.of_test.clear()

    def pytest_assertrepr_compare(self, op: str, left: Any, right: Any) -> list[str] | None:
        """Explain `'inconsistent' == 'consistent'`."""
        words = {left, right} if isinstance(left, str) and isinstance(right, str) else set()
        if op != "==" or "consistent" not in words or not words <= set(get_args(Verdict)):
            return None
        return [line for verdict, lines in self.of_test if verdict in words for line in lines] or None
