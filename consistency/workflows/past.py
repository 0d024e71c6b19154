"""Earlier runs and accepted findings that a result is held against: a plug-in has them."""

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
        """Add a case; return its comparison with the findings of earlier runs."""
        ...

    def commit(self, suite: SuiteResult, *, report: str = "") -> SuiteResult:
        """Append the entry to the history; return the suite, which says so where the entry cannot be written."""
        ...


class Past:
    """No past, which leaves results as they are. A plug-in has one of its own (`consistency.plugins.Plugin.pasts`)."""

    def judged(
        self,
        captures: Sequence[Capture],  # noqa: ARG002 - for those that have a past
        comparison: Comparison,
        out: Path | None,  # noqa: ARG002 - as above
    ) -> Comparison:
        """Return a comparison with the findings of earlier runs, and remember it.

        `out` is the folder that its report will be in.
        """
        return comparison

    def accepted(self, comparison: Comparison) -> Comparison:
        """Return a comparison without the findings that were accepted."""
        return comparison

    def suite_entry(self) -> PastOfSuite | None:
        """Return the entry to which the cases of a suite are added; None where nothing is remembered."""
        return None

    def noted(self, case: str, out: Path | None = None) -> AbstractContextManager[None]:  # noqa: ARG002 - as above
        """Note that a run has started, until it is remembered."""
        return nullcontext()


NO_PAST = Past()


def held_against(
    past: Past, entry: PastOfSuite | None, name: str, captures: Sequence[Capture], comparison: Comparison
) -> Comparison:
    """Return the comparison of a suite's case, marked by accepted findings and earlier runs.

    The case is added to the entry of the suite, where there is one.
    """
    if entry is None:
        return past.accepted(comparison)
    return entry.add(name, captures, comparison)


def opened_past(history: AnyPath | None, baseline: AnyPath | None) -> Past:
    """Return the history at a folder or URL and the baseline in a file, where they are given.

    Raises
    ------
    UsageError
        The extra that reads them is not installed.
    """
    if history is None and baseline is None:
        return NO_PAST
    for _, open_past in plugins.offered("pasts"):  # the first plug-in that has a past
        past: Past = open_past(history, baseline)
        return past
    option = "history" if history is not None else "baseline"
    extra = plugins.absent("commands").get(option, "")
    raise UsageError(plugins.not_installed(f"--{option}", extra), where=f"--{option}", hint=plugins.INSTALL)


def resolved(out: Path | None) -> str:
    """Return the folder of a report as a history names it; empty without one."""
    return "" if out is None else str(out.resolve())
