"""Captures that are damaged, and workers that were lost or failed: why, on which card, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

from consistency.capture.names import DISK_FULL, EXCEEDED_TIMEOUT, KILLED, SILENT
from consistency.capture.wording import some
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.outcomes import group_by_key
from consistency.comparison.result import Finding
from consistency.comparison.workers import ComparedWorker

_MOST_CARDS = 3
_FRAMES = 12
_INNERMOST_FIRST = "(most recent call first)"

_MAKE_ROOM = "make room on the disk of --out, or give another --out: what was recorded before is compared here"
_AFTER_LOSS = (
    (DISK_FULL, _MAKE_ROOM),
    (os.strerror(errno.ENOSPC), _MAKE_ROOM),
    (KILLED, "look for the kernel's out-of-memory killer: dmesg -T | grep -i 'killed process'"),
    (EXCEEDED_TIMEOUT, "give it more time with --timeout, or look at the stack above for what it waits for"),
    (SILENT, "look at the stack above for what it waits for, and at the device's log (dmesg)"),
)
"""Parts of reasons, each with the advice for workers that were lost for it; the first that fits is given."""


def find_damage(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report captures that could not be read as a whole or in part."""
    for message in evidence.damage:
        yield Finding(kind=kinds.DAMAGED_CAPTURE, severity="error", message=message)


def find_lost_workers(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report workers that did not end well, those that ended alike together."""
    # workers with one end and one stack are one finding
    ends = (
        ((worker.info.status, worker.info.reason, worker.info.stack), worker)
        for worker in evidence.workers
        if worker.info.status != "ok"
    )
    for (status, reason, stack), workers in group_by_key(ends).items():
        is_lost = status == "lost"
        noun = "worker" if len(workers) == 1 else "workers"
        names = some(list(map(_label_and_load_path, workers)))
        opening = f"{noun} {names} {_verb(status, len(workers))}"
        kind = kinds.LOST_WORKER if is_lost else kinds.FAILED_WORKER
        advice = _after_loss(reason or "") if is_lost else None
        yield Finding(
            kind=kind,
            severity="error",
            message=f"{opening}: {reason}",
            # details behind a semicolon differ from case to case
            general=f"{opening}: {(reason or '').partition(';')[0]}",
            workers=tuple(worker.label for worker in workers),
            cause=reason,
            detail=(*_cards(workers), *_innermost_frames(stack or "")),
            next=advice,
        )


def _verb(status: str, count: int) -> str:
    if status != "lost":
        return "failed"
    return "was lost" if count == 1 else "were lost"


def _after_loss(reason: str) -> str | None:
    """Return what to do after a worker was lost; None where its reason gives no hint."""
    for part_of_reason, advice in _AFTER_LOSS:
        if part_of_reason in reason:
            return advice
    return None


def _innermost_frames(stack: str) -> list[str]:
    """Return the innermost frames of a stack: the last of a traceback, the first ones that `faulthandler` writes.

    `faulthandler` writes every thread, the main one last; which thread took the signal says nothing.
    """
    if _INNERMOST_FIRST in stack:
        return stack.strip().rpartition("\n\n")[2].splitlines()[:_FRAMES]
    return stack.splitlines()[-_FRAMES:]


def _cards(workers: Sequence[ComparedWorker]) -> Iterator[str]:
    """Name the cards of workers as other tools do: the number of a device is its place in one process."""
    for worker in workers[:_MOST_CARDS]:
        info = worker.info
        if info.uuid or info.pci_bus_id:
            names = (info.model, info.uuid, info.pci_bus_id and f"PCI {info.pci_bus_id}")
            yield f"{worker.label} is {', '.join(filter(None, names))}"


def _label_and_load_path(worker: ComparedWorker) -> str:
    """Return the name of a worker, with its load path where that is not the usual one."""
    return worker.label if worker.load_path == "isolated" else f"{worker.label} ({worker.load_path})"


FINDERS = (
    Finder(name="damaged captures", phase=Phase.COMPLETENESS, position=1, find=find_damage),
    Finder(name="lost workers", phase=Phase.COMPLETENESS, position=2, find=find_lost_workers),
)
