"""What the ranks of a group do to each other's adapter, where no row of theirs is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from consistency.capture.names import ADAPTER_ON
from consistency.capture.wording import counted, some
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.outcomes import worst_of
from consistency.comparison.result import Finding, Outcome, TensorComparison
from consistency.extras.training.collectives.spec import COLLECTIVES
from consistency.extras.training.kinds import HEALTHY_SPLIT, REPLICA_DRIFT
from consistency.extras.training.tensor_parallel.spec import TENSOR_PARALLEL
from consistency.extras.training.words import UNSYNCHRONIZED
from consistency.numerics import words
from consistency.numerics.rules import Rule

_BEFORE = "add the adapter before fully_shard, as accelerate and transformers' Trainer do"


def find_ranks(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report adapters that nothing synchronizes, replicas that drift apart, healthy splits, sums in another order."""
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
                    next=_BEFORE,
                )
            elif row.word == words.DIFFERS and row.reason:
                yield _drift(tensor, row)
    yield from _healthy(evidence.tensors)
    yield from _sums_again(evidence.tensors)


def _healthy(tensors: Sequence[TensorComparison]) -> Iterator[Finding]:
    """Say of a model in parts whether its difference from one device is healthy, where no tensor is wrong."""
    split = [tensor for tensor in tensors if tensor.stage == TENSOR_PARALLEL]
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


def _drift(tensor: TensorComparison, row: Outcome) -> Finding:
    share = "" if row.ratio is None else f", by at most {float(row.ratio):.2g} of what the optimizer may round"
    return Finding(
        kind=REPLICA_DRIFT,
        severity="note",
        message=f"{tensor.stage} · {some(row.workers)} · {row.reason}{share}: other kernels than on "
        f"{some(list(map(str, row.evidence.get('ranks', ()))))}, the same gradients",
        workers=row.workers,
        tensors=(tensor.name,),
    )


def _sums_again(tensors: Sequence[TensorComparison]) -> Iterator[Finding]:
    """Report, once for each set of workers, how many sums they did not repeat bit for bit, and by which library."""
    found: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for tensor in tensors:
        if tensor.stage != COLLECTIVES or tensor.rule != Rule.LIMIT:
            continue
        for row in tensor.outcomes:
            if row.status == "within" and row.reason:
                found.setdefault((tuple(row.workers), _library(row.evidence)), []).append(tensor.name)
    for (workers, library), names in found.items():
        yield Finding(
            kind=kinds.NOT_REPEATABLE,
            severity="note",
            message=f"{COLLECTIVES} · {some(workers)} · {counted(len(names), 'sum')} had other bits, within "
            f"tolerance, when repeated: the order is not fixed ({library})",
            workers=workers,
            tensors=tuple(names),
        )


def _library(evidence: dict[str, object]) -> str:
    """Return the backend, its version, its algorithm and its protocol, as far as they are known."""
    named = [str(evidence[name]) for name in ("backend", "version") if name in evidence]
    chosen = [f"{name} {evidence[name]}" for name in ("algorithm", "protocol") if name in evidence]
    return ", ".join([" ".join(named), *chosen])


RANKS = Finder(name="ranks", phase=Phase.STAGES, position=2, find=find_ranks)
