"""What a comparison says of each worker: its verdict, and its worst error/tolerance."""

from __future__ import annotations

import math

from consistency.case.stages import Stage
from consistency.comparison.result import Comparison, Verdict


def verdicts(comparison: Comparison) -> dict[str, Verdict]:
    """Return a verdict by the name of each worker, on all load paths: `inconsistent` where an error names it."""
    named = {name for finding in comparison.findings if finding.severity == "error" for name in finding.workers}
    found: dict[str, Verdict] = {}
    for worker in comparison.workers:
        if worker.status != "ok":
            found[worker.name] = "incomplete"
        elif worker.name not in found:
            found[worker.name] = "inconsistent" if worker.name in named else "consistent"
    return found


def worst_ratios(comparison: Comparison) -> dict[str, float]:
    """Return the largest error/tolerance of the model's tensors by worker, NaN before any number.

    Single operators are left out: one rounding to a half type uses up the tolerance of that operator, on any device. So
    are facts, whose limits are of another kind. A worker without such a tensor has no entry.
    """
    found: dict[str, float] = {}
    for tensor in comparison.tensors:
        if tensor.stage == Stage.OPERATORS or tensor.rule == "limit":
            continue
        for row in tensor.rows:
            if row.bound_ratio is not None:
                found[row.worker] = worse(float(row.bound_ratio), found.get(row.worker))
    return found


def worse(ratio: float, known: float | None) -> float:
    """Return the larger of two ratios; NaN is larger than any number."""
    return ratio if known is None or math.isnan(ratio) or ratio > known else known
