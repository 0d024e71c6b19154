"""Captures that were made: read and compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consistency.capture.archives import read_sent
from consistency.capture.folder import Capture, capture_name
from consistency.capture.reader import NoCaptureError, RecordPool, brief, read_capture
from consistency.capture.transport import ARCHIVE
from consistency.comparison.compare import compare
from consistency.comparison.result import Comparison
from consistency.comparison.site_groups import NO_GROUPS, SiteGroups
from consistency.errors import CaptureError, UsageError

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
