"""Captures that exist, read and compared."""

from __future__ import annotations

import itertools
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

_MOST_DAMAGE = 6
"""Damaged files that an error names: one line is no place for a thousand workers."""


def read_captures(
    sources: Sequence[Capture | str | Path], scratch: Path | None = None
) -> tuple[list[Capture], list[str]]:
    """Return the captures that can be read, and one sentence for each of the others.

    One damaged capture, or one of another version, does not keep a thousand others from being compared. A path that
    leads nowhere is a mistake in the command, not a damaged capture.

    Parameters
    ----------
    scratch : Path or None
        Folder in which archives are unpacked, as long as the captures are used; None if all sources are folders.

    Raises
    ------
    CaptureError
        A folder is missing or is no capture, or no capture can be read.
    """
    pool = RecordPool()
    captures: list[Capture] = []
    errors: list[CaptureError] = []
    unread: list[str] = []
    for source in sources:
        try:
            captures.append(_read_source(source, scratch, pool))
        except NoCaptureError:  # a mistake in the command, and no damage
            raise
        except CaptureError as error:
            errors.append(error)
            unread.append(f"{capture_name(Path(str(source))).removesuffix(ARCHIVE)}: left out: {brief(error)}")
    if errors and not captures:
        raise errors[0]
    return captures, unread


def _read_source(source: Capture | str | Path, scratch: Path | None, pool: RecordPool) -> Capture:
    if isinstance(source, Capture):
        return source
    if scratch is None:
        return read_capture(Path(source), pool)
    return read_sent(str(source), scratch, pool)


def compare_captures(
    captures: Sequence[Capture], *, unread: Sequence[str] = (), groups: SiteGroups = NO_GROUPS
) -> Comparison:
    """Compare captures.

    Parameters
    ----------
    unread : sequence of str
        One sentence for each capture that cannot be read.
    groups : SiteGroups
        What hosts are grouped by at the user's site.

    Raises
    ------
    UsageError
        No tensor was checked, and no worker was lost: the options select nothing.
    CaptureError
        The same, because no worker of the captures can be read.
    """
    comparison = compare(captures, unread=unread, groups=groups)
    if comparison.tensors or any(worker.status != "ok" for worker in comparison.workers):
        return comparison
    damage = list(itertools.chain.from_iterable(capture.damage for capture in captures))
    if damage:
        raise CaptureError("no worker of the capture can be read", got="; ".join(damage[:_MOST_DAMAGE]))
    raise UsageError("no tensor was checked: the options select none", where="--stages or --only")
