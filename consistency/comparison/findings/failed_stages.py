"""A stage that ended by an error of the model's, of PEFT's or of its own code: what it had recorded is compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from consistency.capture.wording import some
from consistency.comparison.kinds import FindingKind
from consistency.comparison.result import Finding
from consistency.comparison.workers import ComparedWorker


def find_failed_stages(compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    """Report each error once, with the stages that are incomplete for it and the workers that met it."""
    stages: dict[str, dict[str, None]] = {}
    workers: dict[str, dict[str, None]] = {}
    for worker in compared:
        for stage, reason in worker.failures.items():
            stages.setdefault(reason, {})[stage] = None
            workers.setdefault(reason, {})[worker.label] = None
    for reason, of_stages in stages.items():
        labels = tuple(workers[reason])
        yield Finding(
            kind=FindingKind.FAILED_STAGE,
            severity="error",
            message=f"{some(list(of_stages))} · not complete on {some(labels)}: {reason}",
            workers=labels,
        )
