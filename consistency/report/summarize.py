"""What a suite keeps of a comparison: values that hold nothing of it, so that its memory is free for the next case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from consistency.case.load_path import LoadPath
from consistency.comparison.by_worker import worse, worst_ratios
from consistency.comparison.outcomes import Workers, worst_of
from consistency.comparison.result import BAD, Comparison, Finding, Outcome, TensorComparison
from consistency.comparison.suite import CaseResult, CaseStage
from consistency.numerics.real import Real
from consistency.report.findings import findings_of, reproducible
from consistency.report.sentences import sentence
from consistency.report.summary import stages

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
        stages=tuple(_stage(stage, tensors, comparison) for stage, tensors in by_stage.items()),
        reproducible=tuple(sorted(reproducible(comparison))),
        workers=tuple(
            msgspec.structs.replace(worker, environment={}, asked={}, in_force={}, stage_memory=(), soak=None)
            for worker in comparison.workers
        ),
        not_checked=comparison.not_checked,
        checked_elsewhere=comparison.checked_elsewhere,
        ratios={name: Real(ratio) for name, ratio in worst_ratios(comparison).items()},
        accepted=sum(finding.accepted is not None for finding in comparison.findings),
        merging=comparison.merging,
        versions=comparison.versions,
    )


def _findings(comparison: Comparison) -> Iterator[Finding]:
    for finding in findings_of(comparison):
        one_of_stage = {name.partition("::")[0]: name for name in reversed(finding.tensors)}
        tensors = sorted(one_of_stage.values(), key=finding.tensors.index)
        yield msgspec.structs.replace(finding, detail=finding.detail[:_MOST_DETAILS], tensors=tuple(tensors))


def _stage(stage: str, tensors: Sequence[TensorComparison], comparison: Comparison) -> CaseStage:
    """Return a stage's worst status, its worst ratio with its place, and its times."""
    counts: dict[str, int] = {}
    worst: dict[tuple[Workers, str], Outcome] = {}
    worst_ratio, place, worker, first_bad = None, None, None, None
    for tensor in tensors:
        row = worst_of(tensor.outcomes)
        counts[row.status] = counts.get(row.status, 0) + 1
        if row.status in BAD and first_bad is None:
            first_bad = tensor.layer
        for one in tensor.outcomes:
            key = (one.workers, tensor.load_path)
            worst[key] = worst_of((worst.get(key, one), one))
            if (share := one.share) is not None and worse(share, worst_ratio) is share:
                worst_ratio, place, worker = share, tensor.name, one.workers[0]
    of_workers: dict[tuple[str, str], Outcome] = {}
    for (names, load_path), one in worst.items():
        for name in names:
            of_workers[load_path, name] = worst_of((of_workers.get((load_path, name), one), one))
    listed = (worker.name for worker in comparison.workers)
    order = dict.fromkeys((*listed, *(name for _, name in of_workers)))
    paths = dict.fromkeys(path for path, _ in of_workers)
    in_order = [(path, name) for path in paths for name in order if (path, name) in of_workers]
    return CaseStage(
        stage=stage,
        status=worst_of(worst.values()).status,
        counts=counts,
        worst_ratio=None if worst_ratio is None else Real(worst_ratio),
        worst_tensor=place,
        worst_worker=worker,
        first_bad=first_bad,
        workers={with_load_path(name, path): of_workers[path, name].status for path, name in in_order},
        elapsed_s={
            with_load_path(worker.name, worker.load_path): one.elapsed_s
            for worker in comparison.workers
            for one in worker.stage_memory
            if one.stage == stage and one.elapsed_s is not None
        },
    )


def with_load_path(worker: str, load_path: str) -> str:
    """Name a worker on a load path, which is named where it is not the usual one: `cuda:0 (shared)`."""
    return worker if load_path == LoadPath.ISOLATED else f"{worker} ({load_path})"


def without_load_path(name: str) -> str:
    """Return the worker of such a name."""
    return name.rpartition(" (")[0] if name.endswith(")") else name
