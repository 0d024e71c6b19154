"""Earlier runs and accepted findings, which a result may be held against: a plug-in has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from consistency import plugins
from consistency.capture.folder import Capture
from consistency.comparison.result import Comparison
from consistency.comparison.suite import SuiteResult
from consistency.errors import UsageError

AnyPath = str | os.PathLike[str]


class PastOfSuite(Protocol):
    """The entry of a suite in the making: its cases are added one after the other, and committed together."""

    def add(self, name: str, captures: Sequence[Capture], comparison: Comparison) -> Comparison:
        """Add a case; return its comparison with what the past says of it."""
        ...

    def commit(self, suite: SuiteResult, *, report: str = "") -> SuiteResult:
        """Append the entry; return the suite, which says so where it cannot be written."""
        ...


class Past:
    """No past: a result is what it is. A plug-in has one of its own (`consistency.plugins.Plugin.pasts`)."""

    def judged(
        self,
        captures: Sequence[Capture],  # noqa: ARG002 - for those that have a past
        comparison: Comparison,
        out: Path | None,  # noqa: ARG002 - as above
    ) -> Comparison:
        """Return a comparison with what the past says of it, and remember it.

        `out` is the folder that its report will be in.
        """
        return comparison

    def accepted(self, comparison: Comparison) -> Comparison:
        """Return a comparison without the findings that were accepted."""
        return comparison

    def suite_entry(self) -> PastOfSuite | None:
        """Return the entry that the cases of a suite are to be added to; None where nothing is remembered."""
        return None

    def noted(self, case: str, out: Path | None = None) -> AbstractContextManager[None]:  # noqa: ARG002 - as above
        """Note that a run has started, until it is remembered."""
        return nullcontext()


NO_PAST = Past()


def opened_past(history: AnyPath | None, baseline: AnyPath | None) -> Past:
    """Return the history at a folder or URL and the baseline in a file, where they are given.

    Raises
    ------
    UsageError
        What reads them is not installed.
    """
    if history is None and baseline is None:
        return NO_PAST
    for _, opened in plugins.offered("pasts"):
        found: Past = opened(history, baseline)
        return found
    option = "history" if history is not None else "baseline"
    extra = plugins.absent("commands").get(option, "")
    raise UsageError(plugins.not_installed(f"--{option}", extra), where=f"--{option}", hint=plugins.INSTALL)


def resolved(out: Path | None) -> str:
    """Return the folder of a report as a history names it; empty without one."""
    return "" if out is None else str(out.resolve())
