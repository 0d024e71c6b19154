"""Sum up a comparison for a suite, in values that do not refer to it, so that its memory is free for the next case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from consistency.case.load_path import LoadPath
from consistency.comparison.by_worker import worse, worst_ratios
from consistency.comparison.outcomes import Status, Workers, worst_of
from consistency.comparison.result import BAD, Comparison, Finding, Outcome, TensorComparison
from consistency.comparison.suite import CaseResult, CaseStage
from consistency.numerics.real import Real
from consistency.report.findings import findings_of, reproducible
from consistency.report.sentences import sentence
from consistency.report.summary import stages

_MOST_DETAILS = 3  # lines of evidence; the case's own report has all


def summarize(name: str, folder: str, comparison: Comparison, elapsed_s: float) -> CaseResult:
    """Return the result of a case that a suite keeps.

    Parameters
    ----------
    name : str
        Name of the case in the suite.
    folder : str
        Folder of its report, relative to the suite's: `cases/NAME`.
    elapsed_s : float
        Time of the worker that took longest.
    """
    by_stage: dict[str, list[TensorComparison]] = {stage: [] for stage in stages(comparison)}
    for tensor in comparison.tensors:
        by_stage[tensor.stage].append(tensor)
    # The case's own report has the environments and the memory of each worker.
    workers = tuple(
        msgspec.structs.replace(worker, environment={}, asked={}, in_force={}, stage_memory=(), soak=None)
        for worker in comparison.workers
    )
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
        workers=workers,
        not_checked=comparison.not_checked,
        checked_elsewhere=comparison.checked_elsewhere,
        ratios={name: Real(ratio) for name, ratio in worst_ratios(comparison).items()},
        accepted=sum(finding.accepted is not None for finding in comparison.findings),
        merging=comparison.merging,
        versions=comparison.versions,
    )


def _findings(comparison: Comparison) -> Iterator[Finding]:
    """Yield each finding with the first lines of its evidence, and the first tensor of each stage."""
    for finding in findings_of(comparison):
        first_of_stage: dict[str, str] = {}
        for name in finding.tensors:
            first_of_stage.setdefault(name.partition("::")[0], name)
        tensors = tuple(first_of_stage.values())
        yield msgspec.structs.replace(finding, detail=finding.detail[:_MOST_DETAILS], tensors=tensors)


def _stage(stage: str, tensors: Sequence[TensorComparison], comparison: Comparison) -> CaseStage:
    """Return a stage's worst status, its worst ratio with its place, and its times."""
    counts: dict[str, int] = {}
    worst_by_set: dict[tuple[Workers, str], Outcome] = {}  # by workers and load path
    worst_ratio, worst_tensor, worst_worker, first_bad = None, None, None, None
    for tensor in tensors:
        worst = worst_of(tensor.outcomes)
        counts[worst.status] = counts.get(worst.status, 0) + 1
        if worst.status in BAD and first_bad is None:
            first_bad = tensor.layer
        for outcome in tensor.outcomes:
            key = (outcome.workers, tensor.load_path)
            worst_by_set[key] = worst_of((worst_by_set.get(key, outcome), outcome))
            ratio = outcome.share
            if ratio is not None and worse(ratio, worst_ratio) is ratio:
                worst_ratio, worst_tensor, worst_worker = ratio, tensor.name, outcome.workers[0]
    elapsed_s = {}
    for worker in comparison.workers:
        for cost in worker.stage_memory:
            if cost.stage == stage and cost.elapsed_s is not None:
                elapsed_s[with_load_path(worker.name, worker.load_path)] = cost.elapsed_s
    return CaseStage(
        stage=stage,
        status=worst_of(worst_by_set.values()).status,
        counts=counts,
        worst_ratio=None if worst_ratio is None else Real(worst_ratio),
        worst_tensor=worst_tensor,
        worst_worker=worst_worker,
        first_bad=first_bad,
        workers=_statuses(worst_by_set, comparison),
        elapsed_s=elapsed_s,
    )


def _statuses(worst_by_set: Mapping[tuple[Workers, str], Outcome], comparison: Comparison) -> dict[str, Status]:
    """Return the worst status of each worker on each load path, from the worst outcomes of sets of workers."""
    worst: dict[tuple[str, str], Outcome] = {}  # by load path and worker
    for (workers, load_path), outcome in worst_by_set.items():
        for name in workers:
            worst[load_path, name] = worst_of((worst.get((load_path, name), outcome), outcome))
    # The order of the comparison; a worker that is not listed there comes last.
    names = dict.fromkeys((*(worker.name for worker in comparison.workers), *(name for _, name in worst)))
    statuses = {}
    for load_path in dict.fromkeys(load_path for load_path, _ in worst):
        for name in names:
            if (load_path, name) in worst:
                statuses[with_load_path(name, load_path)] = worst[load_path, name].status
    return statuses


def with_load_path(worker: str, load_path: str) -> str:
    """Name a worker on a load path, which is named where it is not the usual one: `cuda:0 (shared)`."""
    return worker if load_path == LoadPath.ISOLATED else f"{worker} ({load_path})"


def without_load_path(name: str) -> str:
    """Return the worker that a name from `with_load_path` is of."""
    return name.rpartition(" (")[0] if name.endswith(")") else name
