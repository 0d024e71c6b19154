"""What a comparison says of each worker: its verdict, and its worst error/tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from consistency.case.stages import Stage
from consistency.comparison.outcomes import Workers
from consistency.comparison.result import Comparison, Finding, Verdict, WorkerSummary


def verdicts(workers: Iterable[WorkerSummary], findings: Iterable[Finding]) -> dict[str, Verdict]:
    """Return a verdict by the name of each worker, on all load paths: `inconsistent` where an error names it."""
    named = {name for finding in findings if finding.severity == "error" for name in finding.workers}
    found: dict[str, Verdict] = {}
    for worker in workers:
        if worker.status != "ok":
            found[worker.name] = "incomplete"
        elif worker.name not in found:
            found[worker.name] = "inconsistent" if worker.name in named else "consistent"
    return found


def worst_ratios(comparison: Comparison) -> dict[str, float]:
    """Return the largest error/tolerance of the model's tensors by worker, NaN before any number.

    A worker without such a tensor has no entry.
    """
    of_sets: dict[int, tuple[Workers, float]] = {}
    for _, workers, ratio in _ratios(comparison):
        _, known = of_sets.get(id(workers), (workers, None))
        of_sets[id(workers)] = workers, worse(ratio, known)
    found: dict[str, float] = {}
    for workers, ratio in of_sets.values():
        for worker in workers:
            found[worker] = worse(ratio, found.get(worker))
    return found


def worst_error(comparison: Comparison) -> tuple[float, str] | None:
    """Return the largest error/tolerance of the model's tensors and its stage; None where nothing has one.

    It is a number of the table: the worst cell of that stage shows the same figure.
    """
    found: tuple[float, str] | None = None
    for stage, _, ratio in _ratios(comparison):
        if found is None or math.isnan(ratio) or ratio > found[0]:
            found = ratio, stage
    return found


def _ratios(comparison: Comparison) -> Iterator[tuple[str, Workers, float]]:
    """Yield stage, workers and error/tolerance of the model's tensors.

    Single operators are left out: one rounding to a half type may use up the tolerance of one. So are facts, whose
    limits are of another kind.
    """
    for tensor in comparison.tensors:
        if tensor.stage == Stage.OPERATORS or tensor.rule == "limit":
            continue
        for outcome in tensor.outcomes:
            ratio = outcome.share
            if ratio is not None:
                yield tensor.stage, outcome.workers, ratio


def worse(ratio: float, known: float | None) -> float:
    """Return the larger of two ratios; NaN is larger than any number."""
    return ratio if known is None or math.isnan(ratio) or ratio > known else known
