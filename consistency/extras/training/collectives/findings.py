"""Findings of sums that a device does not repeat bit for bit, within their tolerance."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.capture.wording import counted, some
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.result import Finding
from consistency.extras.training.collectives.spec import COLLECTIVES
from consistency.numerics.rules import Rule


def find_sums_again(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report, once per set of workers, the number of sums that they did not repeat bit for bit, and the library."""
    names_by_workers: dict[tuple[tuple[str, ...], str], list[str]] = {}
    # a second run is recorded as a fact, whose rule is a limit
    for tensor in evidence.tensors:
        if tensor.stage != COLLECTIVES or tensor.rule != Rule.LIMIT:
            continue
        for row in tensor.outcomes:
            if row.status == "within" and row.reason:
                key = (tuple(row.workers), _library(row.evidence))
                names_by_workers.setdefault(key, []).append(tensor.name)
    for (workers, library), names in names_by_workers.items():
        yield Finding(
            kind=kinds.NOT_REPEATABLE,
            severity="note",
            message=f"{COLLECTIVES} · {some(workers)} · {counted(len(names), 'sum')} had other bits, within "
            f"tolerance, when repeated: the order is not fixed ({library})",
            workers=workers,
            tensors=tuple(names),
        )


def _library(evidence: dict[str, object]) -> str:
    """Return the backend, its version, its algorithm and its protocol, as far as they are known."""
    backend = [str(evidence[name]) for name in ("backend", "version") if name in evidence]
    choices = [f"{name} {evidence[name]}" for name in ("algorithm", "protocol") if name in evidence]
    return ", ".join([" ".join(backend), *choices])


SUMS_AGAIN = Finder(name="sums again", phase=Phase.STAGES, position=2, find=find_sums_again)
