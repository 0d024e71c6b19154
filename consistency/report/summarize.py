"""What a suite keeps of a comparison: values that hold nothing of it, so that its memory is free for the next case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from consistency.comparison.by_worker import worst_ratios
from consistency.comparison.outcomes import Workers, worst_of
from consistency.comparison.result import BAD, Comparison, Outcome, TensorComparison, WorkerSummary
from consistency.comparison.suite import CaseFinding, CaseResult, CaseStage, CaseWorker
from consistency.numerics.real import Real
from consistency.report.findings import findings_of, reproducible
from consistency.report.sentences import sentence
from consistency.report.summary import is_larger, stages

_MOST_DETAILS = 3  # lines of evidence; the case's own report has all


def summarize(name: str, folder: str, comparison: Comparison, elapsed_s: float) -> CaseResult:
    """Return what a suite keeps of a case.

    Parameters
    ----------
    name : str
        Of the case in the suite.
    folder : str
        Of its report, relative to the suite's: `cases/NAME`.
    elapsed_s : float
        Of the worker that took longest.
    """
    by_stage: dict[str, list[TensorComparison]] = {stage: [] for stage in stages(comparison)}
    for tensor in comparison.tensors:
        by_stage[tensor.stage].append(tensor)
    return CaseResult(
        name=name,
        folder=folder,
        verdict=comparison.verdict,
        headline=sentence(comparison),
        base=comparison.base,
        adapter=comparison.adapter,
        dtype=comparison.dtype,
        level=comparison.level,
        profile=comparison.profile,
        settings=comparison.settings,
        elapsed_s=elapsed_s,
        findings=tuple(_findings(comparison)),
        stages=tuple(_stage(stage, tensors, comparison.workers) for stage, tensors in by_stage.items()),
        workers=tuple(
            CaseWorker(
                name=worker.name, load_path=worker.load_path, architecture=worker.architecture, model=worker.model,
                status=worker.status, reason=worker.reason, simulated=worker.simulated,
                uuid=worker.uuid, host=worker.host,
            )
            for worker in comparison.workers
        ),
        not_checked=comparison.not_checked,
        ratios={name: Real(ratio) for name, ratio in worst_ratios(comparison).items()},
        accepted=sum(finding.accepted is not None for finding in comparison.findings),
        merging=comparison.merging,
        versions=comparison.versions,
    )  # fmt: skip


def _findings(comparison: Comparison) -> Iterator[CaseFinding]:
    shown_again = reproducible(comparison)
    for number, finding in enumerate(findings_of(comparison), start=1):
        yield CaseFinding(
            number=number,
            kind=finding.kind,
            severity=finding.severity,
            message=finding.message,
            general=finding.general or finding.message,
            workers=finding.workers,
            stages=tuple(dict.fromkeys(name.partition("::")[0] for name in finding.tensors)),
            tensors=len(finding.tensors),
            is_reproducible=number in shown_again,
            detail=finding.detail[:_MOST_DETAILS],
            next=finding.next,
        )


def _stage(stage: str, tensors: Sequence[TensorComparison], timed: Sequence[WorkerSummary]) -> CaseStage:
    """Return a stage's worst status, its worst ratio with its place, and its times."""
    counts: dict[str, int] = {}
    worst: dict[int, tuple[Workers, Outcome]] = {}
    worst_ratio, place, worker, first_bad = None, None, None, None
    for tensor in tensors:
        row = worst_of(tensor.outcomes)
        counts[row.status] = counts.get(row.status, 0) + 1
        if row.status in BAD and first_bad is None:
            first_bad = tensor.layer
        for one in tensor.outcomes:
            workers, known = worst.get(id(one.workers), (one.workers, one))
            worst[id(workers)] = workers, worst_of((known, one))
            if one.share is not None and is_larger(one.share, worst_ratio):
                worst_ratio, place, worker = one.share, tensor.name, one.workers[0]
    of_workers: dict[str, Outcome] = {}
    for names, one in worst.values():
        of_workers.update({name: worst_of((of_workers.get(name, one), one)) for name in names})
    return CaseStage(
        stage=stage,
        status=worst_of(row for _, row in worst.values()).status,
        counts=counts,
        worst_ratio=None if worst_ratio is None else Real(worst_ratio),
        worst_tensor=place,
        worst_worker=worker,
        first_bad=first_bad,
        workers={name: row.status for name, row in of_workers.items()},
        elapsed_s=_times(stage, timed),
    )


def _times(stage: str, workers: Sequence[WorkerSummary]) -> dict[str, float]:
    """Return the time of a stage by worker, on all of its load paths."""
    found: dict[str, float] = {}
    for worker in workers:
        for one in worker.stage_memory:
            if one.stage == stage and one.elapsed_s is not None:
                found[worker.name] = found.get(worker.name, 0.0) + one.elapsed_s
    return found
