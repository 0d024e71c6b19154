"""Explain failed tests: the error of the one run that all items need, and the reason beside a bare assertion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest

from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.whole_file import write_whole
from consistency.comparison.result import Comparison, Verdict
from consistency.errors import ConsistencyError, first_line
from consistency.report.findings import problems
from consistency.text import clean


@contextmanager
def leaving_its_error(path: Path) -> Iterator[None]:
    """Write the error that ends the run inside, whatever it is, for `raise_error` in other processes."""
    try:
        yield
    except BaseException as error:
        write_whole(path, [encode_json(_explained(error).parts)])
        raise


def raise_error(path: Path) -> None:
    """Raise the error that a run has left, if there is one."""
    if path.exists():
        raise ConsistencyError(**decode_json(path.read_bytes(), dict[str, Any]))


@contextmanager
def without_stack() -> Iterator[None]:
    """Turn an error of the set-up into a failure with its text alone.

    Such are an input that cannot be used, a worker that was lost, and the time limit that another plugin has set.
    """
    try:
        yield
    except (ConsistencyError, pytest.fail.Exception) as error:
        raise pytest.fail.Exception(clean(str(error)), pytrace=False) from None


def _explained(error: BaseException) -> ConsistencyError:
    """Return the error that other processes raise in the place of one that stopped the run."""
    if isinstance(error, ConsistencyError):
        return error
    return ConsistencyError(
        "the run was stopped, and is not started again for other items",
        got=first_line(error),
        hint="the first item runs the devices for all: a time limit per item must allow for that, or count the test "
        "alone (timeout_func_only of pytest-timeout); --consistency-timeout limits each worker",
    )


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
        if op != "==" or not isinstance(left, str) or not isinstance(right, str):
            return None
        compared = {left, right}
        is_about_verdict = "consistent" in compared and compared <= set(get_args(Verdict))
        if not is_about_verdict:
            return None
        lines = []
        for verdict, problem_lines in self.of_test:
            if verdict in compared:
                lines += problem_lines
        return lines or None
