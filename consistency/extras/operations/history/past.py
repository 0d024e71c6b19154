"""The past of a result: a history, a baseline, or both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from consistency.capture.folder import Capture
from consistency.comparison.result import Comparison
from consistency.workflows.past import Past, resolved

if TYPE_CHECKING:
    from consistency.extras.operations.history.baseline import Baseline
    from consistency.extras.operations.history.store import History
    from consistency.extras.operations.history.suite import SuiteEntry


@dataclass(frozen=True, kw_only=True)
class HistoryAndBaseline(Past):
    """Earlier runs and accepted findings that a result is held against; None for the one that is not given."""

    history: History | None = None
    baseline: Baseline | None = None

    # imports are within, so that a run without a past does not wait for them

    def judged(self, captures: Sequence[Capture], comparison: Comparison, out: Path | None) -> Comparison:
        """Add a run to the history; return its comparison as history and baseline judge it.

        `out` is the folder that its report will be in.
        """
        if self.history is None:
            comparison = self.accepted(comparison)
        else:
            from consistency.extras.operations.history.drift import add_run

            comparison = add_run(self.history, captures, comparison, self.baseline, report=resolved(out))
        if self.baseline is None:
            return comparison
        from consistency.extras.operations.history.baseline import with_stale

        return with_stale(self.baseline, comparison)

    def accepted(self, comparison: Comparison) -> Comparison:
        """Return a comparison in which the findings that the baseline accepts are notes."""
        if self.baseline is None:
            return comparison
        from consistency.extras.operations.history.baseline import apply

        return apply(self.baseline, comparison)

    def suite_entry(self) -> SuiteEntry | None:
        """Return the entry that the cases of a suite are to be added to; None without a history."""
        if self.history is None:
            return None
        from consistency.extras.operations.history.suite import SuiteEntry

        return SuiteEntry(self.history, self.baseline)

    def noted(self, case: str, out: Path | None = None) -> AbstractContextManager[None]:
        """Note in the history, if there is one, that a run has started, until it has an entry."""
        if self.history is None:
            return nullcontext()
        from consistency.extras.operations.history import store

        return store.noted(self.history, case, report=resolved(out))


def opened(history: str | os.PathLike[str] | None, baseline: str | os.PathLike[str] | None) -> HistoryAndBaseline:
    """Return the history at a folder or URL and the baseline in a file, where they are given."""
    past = HistoryAndBaseline()
    if history is not None:
        from consistency.extras.operations.history.store import History

        past = replace(past, history=History(os.fspath(history)))
    if baseline is not None:
        from consistency.extras.operations.history.baseline import read_baseline

        past = replace(past, baseline=read_baseline(Path(baseline)))
    return past
