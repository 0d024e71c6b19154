"""Devices that get the test words of the digest wrong: their integer arithmetic, or a copy, is at fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from consistency.capture.names import DIGEST_FAULT
from consistency.capture.wording import some
from consistency.comparison.kinds import FindingKind
from consistency.comparison.result import Finding
from consistency.comparison.workers import ComparedWorker


def find_wrong_digests(compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    """Report these devices. Their tensors are compared nevertheless: the host digests copies of them."""
    by_reason: dict[str, list[str]] = {}
    for p in compared:
        if reason := p.info.environment.get(DIGEST_FAULT):
            by_reason.setdefault(str(reason), []).append(p.label)
    for reason, labels in by_reason.items():
        opening = f"{some(labels)} · digests computed on the device are wrong"
        yield Finding(
            kind=FindingKind.WRONG_DIGEST,
            severity="error",
            message=f"{opening}: {reason}; tensors were copied to the host and digested there",
            general=opening,
            workers=tuple(labels),
            next="test the device's integer arithmetic and its copies with the vendor's own tool",
        )
