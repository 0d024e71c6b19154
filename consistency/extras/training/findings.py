"""Findings of ranks that train without a wrong row: adapters that nothing synchronizes, and replicas that drift."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.capture.wording import some
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.result import Finding, Outcome, TensorComparison
from consistency.extras.training.kinds import REPLICA_DRIFT
from consistency.extras.training.words import UNSYNCHRONIZED
from consistency.numerics import words

_HOW_TO_SYNCHRONIZE = "add the adapter before fully_shard, as accelerate and transformers' Trainer do"


def find_ranks(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report adapters that nothing synchronizes, and replicas that drift apart."""
    for tensor in evidence.tensors:
        for row in tensor.outcomes:
            if row.status != "within":
                continue
            if row.word == UNSYNCHRONIZED:
                yield Finding(
                    kind=UNSYNCHRONIZED,
                    severity="note",
                    message=f"{tensor.stage} · each rank trains its own adapter: added after fully_shard, never "
                    f"synchronized ({row.reason}), and one rank's is saved",
                    workers=row.workers,
                    tensors=(tensor.name,),
                    next=_HOW_TO_SYNCHRONIZE,
                )
            elif row.word == words.DIFFERS and row.reason:
                yield _drift_finding(tensor, row)


def _drift_finding(tensor: TensorComparison, row: Outcome) -> Finding:
    amount = ""
    if row.ratio is not None:
        amount = f", by at most {float(row.ratio):.2g} of what the optimizer may round"
    equal_ranks = [str(rank) for rank in row.evidence.get("ranks", ())]
    return Finding(
        kind=REPLICA_DRIFT,
        severity="note",
        message=f"{tensor.stage} · {some(row.workers)} · {row.reason}{amount}: other kernels than on "
        f"{some(equal_ranks)}, the same gradients",
        workers=row.workers,
        tensors=(tensor.name,),
    )


RANKS = Finder(name="ranks", phase=Phase.STAGES, position=2, find=find_ranks)
