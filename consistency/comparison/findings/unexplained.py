"""What is wrong and in no other finding: a verdict is never `consistent` over it, whatever a finder overlooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from consistency.capture.wording import counted, some
from consistency.case.load_path import is_alternative
from consistency.case.stages import Stage
from consistency.comparison.kinds import FindingKind
from consistency.comparison.result import BAD, Finding, TensorComparison

_MOST_DETAILS = 5


def find_unexplained(tensors: Iterable[TensorComparison], found: Sequence[Finding]) -> Iterable[Finding]:
    """Report tensors that are outside, missing or unexpected on workers for which no finding names them.

    An error names them, or on an alternative load path a warning: what all devices alike make of a file is software.
    Of a copy over several hops it names the devices of the hop that is to blame.
    """
    errors = _named(finding for finding in found if finding.severity == "error")
    all_named = _named(finding for finding in found if finding.severity in ("error", "warning"))
    by_stage: dict[str, dict[str, dict[str, None]]] = {}
    for tensor in tensors:
        named = (all_named if is_alternative(tensor.load_path) else errors).get(tensor.name, frozenset())
        for row in tensor.outcomes if tensor.is_wrong else ():
            if row.status in BAD and "" not in named and not (named and tensor.stage == Stage.TRANSFER):
                left = [worker for worker in row.workers if worker not in named]
                by_stage.setdefault(tensor.stage, {}).setdefault(tensor.name, {}).update(dict.fromkeys(left))
    for stage, of_stage in by_stage.items():
        names = [name for name, workers in of_stage.items() if workers]
        affected = tuple(dict.fromkeys(worker for workers in of_stage.values() for worker in workers))
        if names:
            yield Finding(
                kind=FindingKind.UNEXPLAINED,
                severity="error",
                message=f"{stage} · {some(list(affected))} · {counted(len(names), 'tensor')} with a mismatch of no "
                "known cause",
                workers=affected,
                tensors=tuple(names),
                detail=tuple(name.partition("::")[2] for name in names[:_MOST_DETAILS]),
            )


def _named(findings: Iterable[Finding]) -> dict[str, frozenset[str]]:
    """Return the workers that findings name by tensor; an empty name stands for all of them."""
    found: dict[str, frozenset[str]] = {}
    for finding in findings:
        workers = frozenset(finding.workers) or frozenset({""})
        for tensor in finding.tensors:
            found[tensor] = found.get(tensor, frozenset()) | workers
    return found
