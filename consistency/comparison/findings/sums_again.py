"""Sums over ranks that have other bits a second time: a fact of the library, where they are within tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from consistency.capture.wording import counted, some
from consistency.case.stages import Stage
from consistency.comparison.kinds import FindingKind
from consistency.comparison.result import Finding, TensorComparison
from consistency.numerics.rules import Rule


def find_sums_again(tensors: Sequence[TensorComparison]) -> Iterator[Finding]:
    """Report, once for each set of workers, how many sums they did not repeat bit for bit, and by which library."""
    found: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for tensor in tensors:
        if tensor.stage != Stage.COLLECTIVES or tensor.rule != Rule.LIMIT:
            continue
        for row in tensor.outcomes:
            if row.status == "within" and row.reason:
                found.setdefault((tuple(row.workers), _library(row.evidence)), []).append(tensor.name)
    for (workers, library), names in found.items():
        yield Finding(
            kind=FindingKind.NOT_REPEATABLE,
            severity="note",
            message=f"{Stage.COLLECTIVES} · {some(workers)} · {counted(len(names), 'sum')} had other bits, within "
            f"tolerance, when repeated: the order is not fixed ({library})",
            workers=workers,
            tensors=tuple(names),
        )


def _library(evidence: dict[str, object]) -> str:
    """Return the backend, its version, its algorithm and its protocol, as far as they are known."""
    named = [str(evidence[name]) for name in ("backend", "version") if name in evidence]
    chosen = [f"{name} {evidence[name]}" for name in ("algorithm", "protocol") if name in evidence]
    return ", ".join([" ".join(named), *chosen])
