"""What the ranks of one group do to each other's adapter without any of them being wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from consistency.capture.wording import some
from consistency.comparison.kinds import FindingKind
from consistency.comparison.result import Finding, Outcome, TensorComparison
from consistency.numerics.words import Word

_BEFORE = "add the adapter before fully_shard, as accelerate and transformers' Trainer do"


def find_ranks(tensors: Sequence[TensorComparison]) -> Iterator[Finding]:
    """Report adapters that nothing synchronizes, and replicas that drift apart as different programs do."""
    for tensor in tensors:
        for row in tensor.outcomes:
            if row.status != "within":
                continue
            if row.word == Word.UNSYNCHRONIZED:
                yield Finding(
                    kind=Word.UNSYNCHRONIZED,
                    severity="note",
                    message=f"{tensor.stage} · each rank trains its own adapter: added after fully_shard, never "
                    f"synchronized ({row.reason}), and one rank's is saved",
                    workers=row.workers,
                    tensors=(tensor.name,),
                    next=_BEFORE,
                )
            elif row.word == Word.DIFFERS and row.reason:
                yield _drift(tensor, row)


def _drift(tensor: TensorComparison, row: Outcome) -> Finding:
    share = "" if row.ratio is None else f", by at most {float(row.ratio):.2g} of what the optimizer may round"
    return Finding(
        kind=FindingKind.REPLICA_DRIFT,
        severity="note",
        message=f"{tensor.stage} · {some(row.workers)} · {row.reason}{share}: other kernels than on "
        f"{some(list(map(str, row.evidence.get('ranks', ()))))}, the same gradients",
        workers=row.workers,
        tensors=(tensor.name,),
    )
