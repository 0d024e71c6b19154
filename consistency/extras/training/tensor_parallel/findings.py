"""A model in parts whose difference from one device is healthy."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.capture.names import ADAPTER_ON
from consistency.capture.wording import some
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.outcomes import worst_of
from consistency.comparison.result import Finding
from consistency.extras.training.kinds import HEALTHY_SPLIT
from consistency.extras.training.tensor_parallel.spec import TENSOR_PARALLEL
from consistency.numerics.rules import Rule


def find_healthy_splits(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Say of a model in parts whether its difference from one device is healthy, where no tensor is wrong."""
    split = [tensor for tensor in evidence.tensors if tensor.stage == TENSOR_PARALLEL]
    ends = [
        tensor
        for tensor in split
        if tensor.tensor.startswith(ADAPTER_ON) and tensor.rule in (Rule.RELATIVE, Rule.BLOCK)
    ]
    if not ends or any(tensor.is_wrong for tensor in split):
        return
    last = ends[-1]
    judged = [row for row in last.outcomes if row.status in ("within", "equal") and row.allowed is not None]
    if judged:
        worst = worst_of(judged)
        workers = tuple(worker for row in judged for worker in row.workers)
        yield Finding(
            kind=HEALTHY_SPLIT,
            severity="note",
            message=f"{last.stage} · {some(workers)} · {last.layer} are at most {float(worst.max_abs or 0):.2g} off "
            f"float64, and rounding makes up to {float(worst.allowed or 0):.2g} on one device: healthy",
            workers=workers,
            tensors=(last.name,),
        )


HEALTHY_SPLITS = Finder(name="healthy splits", phase=Phase.STAGES, position=2, find=find_healthy_splits)
