"""Captures -> Comparison: align the workers tensor by tensor, judge every row, and collect the findings.

The same code compares the workers of one run, captures from ten hosts, and captures from different days.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from consistency.capture.folder import Capture, capture_name
from consistency.capture.names import ATTENTION, BY_BLOCKS, END_TO_END
from consistency.capture.records import WorkerFacts
from consistency.case import standard
from consistency.case.case import Case
from consistency.case.load_path import SIDES, is_alternative
from consistency.case.stages import MOVES_WEIGHTS, stage_order
from consistency.comparison import kinds
from consistency.comparison.findings.collect import collect
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.merging import mergings
from consistency.comparison.model_or_device import accuse_devices
from consistency.comparison.outcomes import Status, Workers, gathered
from consistency.comparison.records import Key, tables_of
from consistency.comparison.result import (
    BAD,
    ArchitectureGroup,
    Comparison,
    Divergence,
    Finding,
    Source,
    TensorComparison,
    WorkerSummary,
    verdict_of,
)
from consistency.comparison.site_groups import NO_GROUPS, SiteGroups
from consistency.comparison.stage_cohorts import Members
from consistency.comparison.workers import ComparedWorker, choose_reference, gather, load_paths_of, on_load_path
from consistency.devices.backend import FUSED_ATTENTION, OWN_CHOICE
from consistency.devices.backends import backend_of
from consistency.errors import UsageError
from consistency.numerics import words
from consistency.numerics.rules import Rule

VERSIONS = ("python", "torch", "transformers", "peft", "safetensors", "accelerate", "numpy", "cuda")
"""Names in a worker's environment that the head of a report states."""


def compare(captures: Sequence[Capture], *, unread: Sequence[str] = (), groups: SiteGroups = NO_GROUPS) -> Comparison:
    """Compare the workers of one or more captures.

    The first capture's reference worker is the reference.

    Parameters
    ----------
    captures : sequence of Capture
        One or more; `UsageError` where there is none.
    unread : sequence of str
        Why captures could not be read at all.
    groups : SiteGroups
        What the site groups its hosts by.
    """
    if not captures:
        raise UsageError("no capture to compare", wanted="one folder or more")
    workers = gather(captures)
    reference = choose_reference(workers)
    tensors: list[TensorComparison] = []
    load_paths = load_paths_of(workers)
    for load_path in load_paths if reference is not None else ():
        assert reference is not None
        tensors += _compare_load_path(load_path, *on_load_path(workers, reference, load_path))
    first = captures[0].manifest.case
    damage = (*unread, *(text for capture in captures for text in capture.damage))
    hosts = tuple(facts for capture in captures if (facts := capture.manifest.host_facts) is not None)
    evidence = ComparisonEvidence(
        workers=workers, reference=reference, tensors=tensors, hosts=hosts, damage=damage, groups=groups
    )
    findings = collect(evidence)
    return Comparison(
        case=first.name,
        base=first.base,
        adapter=first.adapter,
        dtype=_dtype(first.dtype, reference),
        level=first.level,
        load_paths=load_paths,
        verdict=verdict_of(findings, incomplete=bool(damage) or _is_incomplete(workers, tensors, findings)),
        reference=None if reference is None else reference.label,
        workers=tuple(map(_summary, workers)),
        architectures=_architectures(workers),
        tensors=tuple(tensors),
        findings=findings,
        first_divergence=_first(tensors, _bad),
        first_bitwise_difference=_first(tensors, functools.partial(_other_bits, reference)),
        tolerances=tuple(dict.fromkeys(one for capture in captures for one in capture.manifest.case.tolerance)),
        not_checked=(
            *first.not_checked(),
            *_load_paths_not_checked(first, load_paths),
            *_not_run(tensors),
            *_not_attended(workers, tensors),
            *_not_soaked(workers),
        ),
        checked_elsewhere=first.checked_elsewhere,
        profile=" and ".join(dict.fromkeys(capture.manifest.case.profile for capture in captures)),
        settings=tuple(dict.fromkeys(str(one) for capture in captures for one in capture.manifest.case.settings)),
        simulated=any(p.info.simulated for p in workers),
        hosts=hosts,
        versions=_versions(workers),
        planted=tuple(f"{p.info.planted} in {p.label}" for p in workers if p.info.planted is not None),
        sources=tuple(map(_source, captures)),
        merging=mergings(
            workers, wrong=any(t.stage in (*MOVES_WEIGHTS, standard.MERGED) and t.is_wrong for t in tensors)
        ),
    )


def _versions(workers: Sequence[ComparedWorker]) -> dict[str, str]:
    """Return the versions of the workers; several are joined, in the order of the workers."""
    found: dict[str, dict[str, None]] = {}
    for name in VERSIONS:
        for worker in workers:
            if worker.info.environment.get(name) is not None:
                found.setdefault(name, {})[str(worker.info.environment[name])] = None
    return {name: ", ".join(versions) for name, versions in found.items()}


def _source(capture: Capture) -> Source:
    manifest = capture.manifest
    return Source(
        name=capture_name(capture.folder),
        created=manifest.created,
        host=manifest.host,
        tool=manifest.tool,
        command=manifest.command,
    )


def _load_paths_not_checked(case: Case, taken: Sequence[str]) -> Iterable[str]:
    """Name the alternative paths that were not checked, where there is an adapter to load."""
    if case.adapter is None or standard.ADAPTER not in case.stages:
        return
    left = [f"+{side}" for side in SIDES if side not in {load_path.partition("+")[2] for load_path in taken}]
    if left:
        yield "the adapter's alternative load paths" if len(left) == len(SIDES) else f"the load paths {' '.join(left)}"


def _not_run(tensors: Sequence[TensorComparison]) -> Iterable[str]:
    """Name the modes in which the blocks of a large model were not compared."""
    ends = (t for t in tensors if t.stage == standard.FORWARD and t.tensor.endswith(END_TO_END))
    left = {t.tensor.partition(".")[0]: None for t in ends for row in t.outcomes if BY_BLOCKS in row.evidence}
    if left:
        yield f"the model's blocks with {' and '.join(left)}"


def _not_attended(workers: Sequence[ComparedWorker], tensors: Sequence[TensorComparison]) -> Iterable[str]:
    """Name the kernels of attention that users run, where accelerators computed it by the formula alone."""
    names = {worker.label: worker.info.name.partition("@")[0] for worker in workers if not worker.is_cpu}
    of_model = [tensor for tensor in tensors if tensor.stage == standard.FORWARD]
    fused = (name in names and ATTENTION in row.evidence for tensor in of_model for name, row in tensor.by_worker())
    if not names or not of_model or any(fused):
        return
    name = next(iter(names.values()))
    in_force = [worker.info.in_force for worker in workers if not worker.is_cpu]
    if any(found.get(f"sdpa_{kernel}") is True for found in in_force for kernel in FUSED_ATTENTION):
        yield "fused kernels of attention (torch chose none)"
    elif backend_of(name.partition(":")[0]).variant(OWN_CHOICE) is not None:
        yield f"fused kernels of attention ({name}@{OWN_CHOICE} runs those that torch chooses)"


def _not_soaked(workers: Sequence[ComparedWorker]) -> Iterable[str]:
    """Name the stages that no soak repeated."""
    soaks = [worker.info.soak for worker in workers if worker.info.soak is not None]
    left = {stage.stage: None for soak in soaks for stage in soak.stages if stage.reason is not None}
    if left:
        yield f"{', '.join(left)} during the soak"


def _dtype(asked: str, reference: ComparedWorker | None) -> str:
    """Return the dtype that the base was loaded in: as requested, or as the reference worker found in the files."""
    found = None if reference is None else reference.info.environment.get("dtype")
    return str(found) if asked == "auto" and found else asked


def _compare_load_path(
    load_path: str, members: Sequence[ComparedWorker], reference: ComparedWorker
) -> Iterable[TensorComparison]:
    order: dict[Key, int] = {}
    for table in tables_of(member.records for member in (reference, *members)):
        for key, record in table.items():
            order.setdefault(key, record.order)
    stage_of = functools.cache(Members(members, reference).stage)
    for key in sorted(order, key=lambda k: (stage_order(k[0]), order[k])):
        stage = stage_of(key[0])
        record = stage.first_record(key)
        outcomes, together_with = stage.outcomes(key, expected=record.rule != Rule.LIMIT)
        if not outcomes:
            continue
        if any(words.of_device(outcome.word) for outcome in outcomes):
            outcomes = accuse_devices(outcomes, members)
        yield TensorComparison(
            stage=key[0],
            load_path=load_path,
            layer=key[1],
            tensor=key[2],
            shape=record.shape,
            dtype=record.dtype,
            rule=record.rule,
            classes=stage.classes(key),
            outcomes=outcomes,
            workers=together_with,
        )


def _is_incomplete(
    workers: Sequence[ComparedWorker], tensors: Sequence[TensorComparison], findings: Sequence[Finding]
) -> bool:
    lost = any(worker.info.status != "ok" for worker in workers)
    lost = lost or any(finding.kind == kinds.NOTHING_COMPARED for finding in findings)
    return lost or not tensors or any(row.status == "blocked" for tensor in tensors for row in tensor.outcomes)


def _bad(tensor: TensorComparison) -> Iterable[Workers]:
    return (outcome.workers for outcome in tensor.outcomes if outcome.status in BAD)


def _other_bits(reference: ComparedWorker | None, tensor: TensorComparison) -> Iterable[Workers]:
    """Return the workers that differ bitwise from the reference worker, by class."""
    if reference is None or not tensor.classes or reference.label not in tensor.classes[0]:
        return ()
    return tensor.classes[1:]


def _first(
    tensors: Sequence[TensorComparison], leave: Callable[[TensorComparison], Iterable[Workers]]
) -> tuple[Divergence, ...]:
    """Return, per worker and load path, the first tensor at which it diverges.

    Alternative paths are left out for a worker that diverges on a default one.
    """
    found: dict[tuple[str, str], tuple[TensorComparison, Status]] = {}
    done: set[tuple[Workers, str]] = set()  # the same workers diverge at many tensors
    for tensor in tensors:
        leaving = [workers for workers in leave(tensor) if (workers, tensor.load_path) not in done]
        if not leaving:
            continue
        done.update((workers, tensor.load_path) for workers in leaving)
        names = {name for workers in leaving for name in workers if (name, tensor.load_path) not in found}
        for name, outcome in tensor.by_worker() if names else ():
            if name in names:
                found[name, tensor.load_path] = tensor, outcome.status
    on_default = {worker for worker, load_path in found if not is_alternative(load_path)}
    same: dict[tuple[str, str, Status], tuple[TensorComparison, list[str]]] = {}
    for (worker, load_path), (tensor, of_worker) in found.items():
        if not is_alternative(load_path) or worker not in on_default:
            same.setdefault((load_path, tensor.name, of_worker), (tensor, []))[1].append(worker)
    return tuple(
        Divergence(
            workers=tuple(names),
            load_path=tensor.load_path,
            stage=tensor.stage,
            layer=tensor.layer,
            tensor=tensor.tensor,
            status=of_workers,
        )
        for (_, _, of_workers), (tensor, names) in same.items()
    )


def _architectures(workers: Sequence[ComparedWorker]) -> tuple[ArchitectureGroup, ...]:
    groups = gathered(dict.fromkeys((p.info.architecture, p.label) for p in workers))
    return tuple(ArchitectureGroup(name=name, workers=tuple(labels)) for name, labels in groups.items())


def _summary(worker: ComparedWorker) -> WorkerSummary:
    facts = {name: getattr(worker.info, name) for name in WorkerFacts.__struct_fields__}
    return WorkerSummary(**{**facts, "name": worker.label}, host=worker.capture.manifest.host, device=worker.device)
