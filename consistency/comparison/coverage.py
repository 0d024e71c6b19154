"""What a comparison really compared: by stage, the workers of which at least one tensor was judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from consistency.comparison.outcomes import WorkerSet
from consistency.comparison.result import BAD, TensorComparison

_NOT_JUDGED = frozenset({"skipped", "blocked"})


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was compared in one stage.

    Attributes
    ----------
    workers : dict of str to None
        Those of which a tensor was compared with something outside the worker itself: a file, an exact value, a limit,
        or another worker, which then counts too.
    wrong : dict of str to None
        Those with a mismatch.
    """

    workers: dict[str, None] = field(default_factory=dict)
    wrong: dict[str, None] = field(default_factory=dict)


def coverage(tensors: Iterable[TensorComparison]) -> dict[str, Coverage]:
    """Return what was compared, by stage in the order of the tensors; a stage without any such tensor is not there."""
    found: dict[str, Coverage] = {}
    taken: dict[str, tuple[WorkerSet, WorkerSet]] = {}
    for tensor in tensors:
        judged = [outcome for outcome in tensor.outcomes if outcome.status not in _NOT_JUDGED]
        if all(one.workers == (one.reference,) for one in judged):  # a worker that is its own reference alone
            continue
        if tensor.stage not in found:
            stage = found[tensor.stage] = Coverage()
            taken[tensor.stage] = WorkerSet(stage.workers), WorkerSet(stage.wrong)
        right, wrong = taken[tensor.stage]
        for outcome in judged:
            right.take(outcome.workers)
            if outcome.status in BAD:
                wrong.take(outcome.workers)
    return found
