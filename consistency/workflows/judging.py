"""Captures that were made: read, compared, and held against a history and a baseline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from consistency.capture.archives import read_sent
from consistency.capture.folder import Capture, capture_name
from consistency.capture.reader import NoCaptureError, RecordPool, brief, read_capture
from consistency.capture.transport import ARCHIVE
from consistency.comparison.compare import compare
from consistency.comparison.result import Comparison
from consistency.comparison.site_groups import NO_GROUPS, SiteGroups
from consistency.errors import CaptureError, UsageError

if TYPE_CHECKING:
    from consistency.comparison.history.baseline import Baseline
    from consistency.comparison.history.store import History
    from consistency.comparison.history.suite import SuiteEntry

_MOST_DAMAGE = 6  # one line of an error is no place for a thousand workers


def read_captures(
    sources: Sequence[Capture | str | Path], scratch: Path | None = None
) -> tuple[list[Capture], list[str]]:
    """Return the captures that can be read, and one sentence for each of the others.

    One damaged capture, or one of another version, does not keep a thousand others from being compared. A path that
    leads nowhere is a mistake in the command, not a damaged capture.

    Parameters
    ----------
    scratch : Path or None
        Where those that are no folders are unpacked, as long as the captures are used; None if all are folders.

    Raises
    ------
    CaptureError
        A folder is missing or is no capture, or no capture can be read.
    """
    pool = RecordPool()
    found: list[Capture] = []
    errors: list[CaptureError] = []
    unread: list[str] = []
    for one in sources:
        try:
            if isinstance(one, Capture):
                found.append(one)
            else:
                found.append(read_capture(Path(one), pool) if scratch is None else read_sent(str(one), scratch, pool))
        except NoCaptureError:
            raise
        except CaptureError as error:
            errors.append(error)
            unread.append(f"{capture_name(Path(str(one))).removesuffix(ARCHIVE)}: left out: {brief(error)}")
    if errors and not found:
        raise errors[0]
    return found, unread


def compare_captures(
    captures: Sequence[Capture], *, unread: Sequence[str] = (), groups: SiteGroups = NO_GROUPS
) -> Comparison:
    """Compare captures; `unread` has one sentence for each of them that cannot be read.

    Raises
    ------
    UsageError
        No tensor was checked, and no worker was lost: the options select nothing.
    """
    comparison = compare(captures, unread=unread, groups=groups)
    if not comparison.tensors and all(worker.status == "ok" for worker in comparison.workers):
        damage = [text for capture in captures for text in capture.damage]
        if damage:
            raise CaptureError("no worker of the capture can be read", got="; ".join(damage[:_MOST_DAMAGE]))
        raise UsageError("no tensor was checked: the options select none", where="--stages or --only")
    return comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Earlier runs and accepted findings that a result is held against; there may be neither."""

    history: History | None = None
    baseline: Baseline | None = None

    def judged(self, captures: Sequence[Capture], comparison: Comparison, out: Path | None) -> Comparison:
        """Return a comparison with what both say of it; it is added to the history.

        `out` is the folder that its report will be in.
        """
        if self.history is None:
            comparison = self.accepted(comparison)
        else:
            from consistency.comparison.history.drift import add_run

            comparison = add_run(self.history, captures, comparison, self.baseline, report=resolved(out))
        if self.baseline is None:
            return comparison
        from consistency.comparison.history.baseline import with_stale

        return with_stale(self.baseline, comparison)

    def accepted(self, comparison: Comparison) -> Comparison:
        """Return a comparison without the findings that the baseline accepts."""
        if self.baseline is None:
            return comparison
        from consistency.comparison.history.baseline import apply

        return apply(self.baseline, comparison)

    def suite_entry(self) -> SuiteEntry | None:
        """Return the entry that the cases of a suite are to be added to; None without a history."""
        if self.history is None:
            return None
        from consistency.comparison.history.suite import SuiteEntry

        return SuiteEntry(self.history, self.baseline)

    def noted(self, case: str, out: Path | None = None) -> AbstractContextManager[None]:
        """Note in the history, if there is one, that a run has started, until it has an entry."""
        if self.history is None:
            return nullcontext()
        from consistency.comparison.history import store

        return store.noted(self.history, case, report=resolved(out))


NO_PAST = Past()


def opened_past(history: str | os.PathLike[str] | None, baseline: str | os.PathLike[str] | None) -> Past:
    """Return the history at a folder or URL and the baseline in a file, where they are given."""
    found = NO_PAST
    if history is not None:
        from consistency.comparison.history.store import History

        found = replace(found, history=History(os.fspath(history)))
    if baseline is not None:
        from consistency.comparison.history.baseline import read_baseline

        found = replace(found, baseline=read_baseline(Path(baseline)))
    return found


def resolved(out: Path | None) -> str:
    """Return the folder of a report as a history names it; empty without one."""
    return "" if out is None else str(out.resolve())
