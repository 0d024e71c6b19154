"""Findings of models in parts whose difference from one device is healthy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from consistency.capture.names import ADAPTER_ON
from consistency.capture.wording import some
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.outcomes import worst_of
from consistency.comparison.result import Finding, TensorComparison
from consistency.extras.training.kinds import HEALTHY_SPLIT
from consistency.extras.training.tensor_parallel.spec import TENSOR_PARALLEL
from consistency.numerics.rules import Rule


def find_healthy_splits(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report, where no tensor is wrong, the difference of a model in parts from one device as healthy."""
    tensors = [tensor for tensor in evidence.tensors if tensor.stage == TENSOR_PARALLEL]
    results = [tensor for tensor in tensors if _is_result(tensor)]
    if not results or any(tensor.is_wrong for tensor in tensors):
        return
    # outputs come after the results of blocks
    last = results[-1]
    judged = [row for row in last.outcomes if row.status in ("within", "equal") and row.allowed is not None]
    if judged:
        worst = worst_of(judged)
        workers = tuple(itertools.chain.from_iterable(row.workers for row in judged))
        yield Finding(
            kind=HEALTHY_SPLIT,
            severity="note",
            message=f"{last.stage} · {some(workers)} · {last.layer} are at most {float(worst.max_abs or 0):.2g} off "
            f"float64, and rounding makes up to {float(worst.allowed or 0):.2g} on one device: healthy",
            workers=workers,
            tensors=(last.name,),
        )


def _is_result(tensor: TensorComparison) -> bool:
    """Report whether a tensor is a result of a forward pass with the adapter."""
    return tensor.tensor.startswith(ADAPTER_ON) and tensor.rule in (Rule.RELATIVE, Rule.BLOCK)


HEALTHY_SPLITS = Finder(name="healthy splits", phase=Phase.STAGES, position=2, find=find_healthy_splits)
