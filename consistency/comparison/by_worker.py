"""Summaries of a comparison: verdict and worst error/tolerance of each worker, and the workers compared by stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from consistency.case import standard
from consistency.comparison.outcomes import Workers, union_of_workers
from consistency.comparison.result import BAD, Comparison, Finding, TensorComparison, Verdict, WorkerSummary


def verdicts(workers: Iterable[WorkerSummary], findings: Iterable[Finding]) -> dict[str, Verdict]:
    """Return a verdict by the name of each worker, on all load paths: `inconsistent` where an error names it."""
    named_by_errors = union_of_workers(finding.workers for finding in findings if finding.severity == "error")
    verdict_by_worker: dict[str, Verdict] = {}
    # a worker has a summary per load path: lost on one of them, it is incomplete
    for worker in workers:
        if worker.status != "ok":
            verdict_by_worker[worker.name] = "incomplete"
        elif worker.name not in verdict_by_worker:
            verdict_by_worker[worker.name] = "inconsistent" if worker.name in named_by_errors else "consistent"
    return verdict_by_worker


def worst_ratios(comparison: Comparison) -> dict[str, float]:
    """Return the largest error/tolerance of the model's tensors by worker, NaN before any number.

    A worker without such a tensor has no entry.
    """
    # many tensors have the same sets of workers, so the worst of each set comes first
    worst_by_set: dict[Workers, float] = {}
    for _, workers, ratio in _ratios(comparison):
        worst_by_set[workers] = worse(ratio, worst_by_set.get(workers))
    worst_by_worker: dict[str, float] = {}
    for workers, ratio in worst_by_set.items():
        for worker in workers:
            worst_by_worker[worker] = worse(ratio, worst_by_worker.get(worker))
    return worst_by_worker


def worst_error(comparison: Comparison) -> tuple[float, str] | None:
    """Return the largest error/tolerance of the model's tensors and its stage; None where nothing has one.

    It is a number of the table: the worst cell of that stage shows the same figure.
    """
    ratios = ((ratio, stage) for stage, _, ratio in _ratios(comparison))
    return max(ratios, key=_by_ratio, default=None)


def _by_ratio(pair: tuple[float, str]) -> float:
    """Return the ratio to order by: NaN is larger than any number."""
    ratio = pair[0]
    return math.inf if math.isnan(ratio) else ratio


def _ratios(comparison: Comparison) -> Iterator[tuple[str, Workers, float]]:
    """Yield stage, workers and error/tolerance of the model's tensors.

    Single operators are left out: one rounding to a half type may use up the tolerance of one. So are facts, whose
    limits are of another kind.
    """
    for tensor in comparison.tensors:
        is_fact = tensor.rule == "limit"
        if tensor.stage == standard.OPERATORS or is_fact:
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
    """Return the larger of two ratios; NaN is larger than any number, and any ratio is larger than None."""
    return ratio if known is None or is_larger(ratio, known) else known


_NOT_JUDGED = frozenset({"skipped", "blocked"})


@dataclass(frozen=True, slots=True)
class Coverage:
    """The workers that were compared in one stage."""

    # workers with a tensor that was compared with something outside the worker itself: a file, an exact value, a limit,
    # or another worker, which then counts too
    workers: dict[str, None] = field(default_factory=dict)
    wrong: dict[str, None] = field(default_factory=dict)  # workers with a mismatch


def coverage(tensors: Iterable[TensorComparison]) -> dict[str, Coverage]:
    """Return the workers that were compared, by stage in the order of the tensors.

    A stage in which nothing was compared is left out.
    """
    sets_by_stage: dict[str, tuple[list[Workers], list[Workers]]] = {}
    for tensor in tensors:
        judged = [outcome for outcome in tensor.outcomes if outcome.status not in _NOT_JUDGED]
        if all(outcome.workers == (outcome.reference,) for outcome in judged):  # a worker compared with itself alone
            continue
        compared, wrong = sets_by_stage.setdefault(tensor.stage, ([], []))
        compared += (outcome.workers for outcome in judged)
        wrong += (outcome.workers for outcome in judged if outcome.status in BAD)
    return {
        stage: Coverage(union_of_workers(compared), union_of_workers(wrong))
        for stage, (compared, wrong) in sets_by_stage.items()
    }
