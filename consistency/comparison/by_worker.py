"""What a comparison says of each worker, its verdict and worst error/tolerance, and what it compared by stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from consistency.case import standard
from consistency.comparison.outcomes import Workers, names_in
from consistency.comparison.result import BAD, Comparison, Finding, TensorComparison, Verdict, WorkerSummary


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
    of_sets: dict[Workers, float] = {}
    for _, workers, ratio in _ratios(comparison):
        of_sets[workers] = worse(ratio, of_sets.get(workers))
    found: dict[str, float] = {}
    for workers, ratio in of_sets.items():
        for worker in workers:
            found[worker] = worse(ratio, found.get(worker))
    return found


def worst_error(comparison: Comparison) -> tuple[float, str] | None:
    """Return the largest error/tolerance of the model's tensors and its stage; None where nothing has one.

    It is a number of the table: the worst cell of that stage shows the same figure.
    """
    found = ((ratio, stage) for stage, _, ratio in _ratios(comparison))
    return max(found, key=lambda one: math.inf if math.isnan(one[0]) else one[0], default=None)


def _ratios(comparison: Comparison) -> Iterator[tuple[str, Workers, float]]:
    """Yield stage, workers and error/tolerance of the model's tensors.

    Single operators are left out: one rounding to a half type may use up the tolerance of one. So are facts, whose
    limits are of another kind.
    """
    for tensor in comparison.tensors:
        if tensor.stage == standard.OPERATORS or tensor.rule == "limit":
            continue
        for outcome in tensor.outcomes:
            ratio = outcome.share
            if ratio is not None:
                yield tensor.stage, outcome.workers, ratio


def is_larger(ratio: float, other: float) -> bool:
    """Report whether a ratio is larger than another; NaN is larger than any number."""
    if math.isnan(other):
        return False
    return math.isnan(ratio) or ratio > other


def worse(ratio: float, known: float | None) -> float:
    """Return the larger of two ratios; NaN is larger than any number."""
    return ratio if known is None or is_larger(ratio, known) else known


_NOT_JUDGED = frozenset({"skipped", "blocked"})


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was compared in one stage."""

    # those of which a tensor was compared with something outside the worker itself: a file, an exact value, a limit, or
    # another worker, which then counts too
    workers: dict[str, None] = field(default_factory=dict)
    wrong: dict[str, None] = field(default_factory=dict)  # those with a mismatch


def coverage(tensors: Iterable[TensorComparison]) -> dict[str, Coverage]:
    """Return what was compared, by stage in the order of the tensors; a stage without any such tensor is not there."""
    taken: dict[str, tuple[list[Workers], list[Workers]]] = {}
    for tensor in tensors:
        judged = [outcome for outcome in tensor.outcomes if outcome.status not in _NOT_JUDGED]
        if all(one.workers == (one.reference,) for one in judged):  # a worker that is its own reference alone
            continue
        every, wrong = taken.setdefault(tensor.stage, ([], []))
        every += (outcome.workers for outcome in judged)
        wrong += (outcome.workers for outcome in judged if outcome.status in BAD)
    return {stage: Coverage(names_in(every), names_in(wrong)) for stage, (every, wrong) in taken.items()}
