"""Make a comparison of captures: align the workers tensor by tensor, judge every row, and collect the findings.

The same code compares the workers of one run, captures from ten hosts, and captures from different days.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from consistency.capture.folder import Capture, capture_name
from consistency.capture.names import ATTENTION, BY_BLOCKS, END_TO_END, LONG_TOKENS
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
from consistency.comparison.outcomes import Status, Workers, group_by_key
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
    rows_of,
    verdict_of,
)
from consistency.comparison.site_groups import NO_GROUPS, SiteGroups
from consistency.comparison.stage_cohorts import Members
from consistency.comparison.workers import ComparedWorker, choose_reference, gather, load_paths_of, on_load_path
from consistency.devices.backend import FUSED_ATTENTION, OWN_CHOICE
from consistency.devices.backends import backend_of
from consistency.devices.host.facts import HostFacts
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
    load_paths = load_paths_of(workers)
    tensors: list[TensorComparison] = []
    # without a worker that has records there is nothing to compare
    if reference is not None:
        for load_path in load_paths:
            tensors += _compare_load_path(load_path, *on_load_path(workers, reference, load_path))
    # the first capture's case describes the comparison; other captures may have been made with other options
    cases = [capture.manifest.case for capture in captures]
    first_case = cases[0]
    damage = (*unread, *itertools.chain.from_iterable(capture.damage for capture in captures))
    hosts = tuple(_hosts(captures))
    evidence = ComparisonEvidence(
        workers=workers, reference=reference, tensors=tensors, hosts=hosts, damage=damage, groups=groups
    )
    findings = collect(evidence)
    reference_label = None if reference is None else reference.label
    return Comparison(
        case=first_case.name,
        base=first_case.base,
        adapter=first_case.adapter,
        dtype=_dtype(first_case.dtype, reference),
        level=first_case.level,
        load_paths=load_paths,
        verdict=verdict_of(findings, incomplete=bool(damage) or _is_incomplete(workers, tensors, findings)),
        reference=reference_label,
        workers=tuple(map(_summary, workers)),
        architectures=_architectures(workers),
        tensors=tuple(tensors),
        findings=findings,
        first_divergence=_first_divergences(tensors, _workers_with_mismatch),
        first_bitwise_difference=_first_divergences(tensors, functools.partial(_workers_with_other_bits, reference)),
        tolerances=tuple(dict.fromkeys(itertools.chain.from_iterable(case.tolerance for case in cases))),
        not_checked=tuple(_not_checked(first_case, load_paths, workers, tensors)),
        checked_elsewhere=first_case.checked_elsewhere,
        profile=" and ".join(dict.fromkeys(case.profile for case in cases)),
        settings=tuple(dict.fromkeys(map(str, itertools.chain.from_iterable(case.settings for case in cases)))),
        simulated=any(worker.info.simulated for worker in workers),
        hosts=hosts,
        versions=_versions(workers),
        planted=tuple(
            f"{worker.info.planted} in {worker.label}" for worker in workers if worker.info.planted is not None
        ),
        sources=tuple(map(_source, captures)),
        merging=mergings(workers, wrong=_has_wrong_weight(tensors)),
    )


def _hosts(captures: Sequence[Capture]) -> Iterator[HostFacts]:
    """Yield the facts of hosts of the captures that have them."""
    for capture in captures:
        if capture.manifest.host_facts is not None:
            yield capture.manifest.host_facts


def _has_wrong_weight(tensors: Sequence[TensorComparison]) -> bool:
    """Return whether a weight is wrong, of the base, of the adapter, or merged: no advice on merging is given then."""
    return any(tensor.stage in (*MOVES_WEIGHTS, standard.MERGED) and tensor.is_wrong for tensor in tensors)


def _versions(workers: Sequence[ComparedWorker]) -> dict[str, str]:
    """Return the versions of the workers; several are joined, in the order of the workers."""
    versions_by_name: dict[str, dict[str, None]] = {}
    for name in VERSIONS:
        for worker in workers:
            if worker.info.environment.get(name) is not None:
                versions_by_name.setdefault(name, {})[str(worker.info.environment[name])] = None
    return {name: ", ".join(versions) for name, versions in versions_by_name.items()}


def _source(capture: Capture) -> Source:
    """Describe where a capture came from."""
    manifest = capture.manifest
    return Source(
        name=capture_name(capture.folder),
        created=manifest.created,
        host=manifest.host,
        tool=manifest.tool,
        command=manifest.command,
    )


def _not_checked(
    case: Case,
    load_paths: Sequence[str],
    workers: Sequence[ComparedWorker],
    tensors: Sequence[TensorComparison],
) -> Iterator[str]:
    """Name the parts of a case that were left out: by its options, or because workers could not check them."""
    yield from case.not_checked()
    yield from _load_paths_not_checked(case, load_paths)
    yield from _modes_without_blocks(tensors)
    yield from _larger_shapes(tensors)
    yield from _unused_attention(workers, tensors)
    yield from _stages_not_soaked(workers)


def _load_paths_not_checked(case: Case, taken: Sequence[str]) -> Iterator[str]:
    """Name the alternative paths that were not checked, where there is an adapter to load."""
    if case.adapter is None or standard.ADAPTER not in case.stages:
        return
    sides_taken = {load_path.partition("+")[2] for load_path in taken}
    not_taken = [f"+{side}" for side in SIDES if side not in sides_taken]
    if len(not_taken) == len(SIDES):
        yield "the adapter's alternative load paths"
    elif not_taken:
        yield f"the load paths {' '.join(not_taken)}"


def _modes_without_blocks(tensors: Sequence[TensorComparison]) -> Iterator[str]:
    """Name the modes in which the blocks of a large model were not compared."""
    outputs = (tensor for tensor in tensors if tensor.stage == standard.FORWARD and tensor.tensor.endswith(END_TO_END))
    modes = {tensor.tensor.partition(".")[0]: None for tensor, row in rows_of(outputs) if BY_BLOCKS in row.evidence}
    if modes:
        yield f"the model's blocks with {' and '.join(modes)}"


def _larger_shapes(tensors: Sequence[TensorComparison]) -> Iterator[str]:
    """Name the longest text and the most rows of a product that were compared: kernels are chosen by shape."""
    longest = rows = 0
    for tensor, row in rows_of(tensor for tensor in tensors if tensor.stage == standard.FORWARD):
        if row.ratio is None or tensor.tensor.endswith(END_TO_END):
            continue
        if LONG_TOKENS in row.evidence:
            tokens = int(row.evidence[LONG_TOKENS])
            longest, rows = max(longest, tokens), max(rows, tokens)
        elif tensor.shape is not None and len(tensor.shape) == 3 and ".input." not in f".{tensor.tensor}":
            longest, rows = max(longest, tensor.shape[1]), max(rows, tensor.shape[0] * tensor.shape[1])
    if longest:
        yield f"texts of more than {longest} tokens, and products of more than {rows} rows"


def _unused_attention(workers: Sequence[ComparedWorker], tensors: Sequence[TensorComparison]) -> Iterator[str]:
    """Name the kernels of attention that users run, where accelerators computed it by the formula alone."""
    accelerators = [worker for worker in workers if not worker.is_cpu and not worker.is_engine]
    forward = [tensor for tensor in tensors if tensor.stage == standard.FORWARD]
    if not accelerators or not forward or _ran_fused_attention(accelerators, forward):
        return
    # where torch was free to choose a fused kernel, it saw no use for one; else the user can add a device variant
    device = accelerators[0].info.name.partition("@")[0]
    device_type = device.partition(":")[0]
    if any(_may_fuse_attention(worker) for worker in accelerators):
        yield "fused kernels of attention (torch chose none)"
    elif backend_of(device_type).variant(OWN_CHOICE) is not None:
        yield f"fused kernels of attention ({device}@{OWN_CHOICE} runs those that torch chooses)"


def _ran_fused_attention(accelerators: Sequence[ComparedWorker], forward: Sequence[TensorComparison]) -> bool:
    """Return whether an accelerator recorded a fused kernel of attention."""
    labels = {worker.label for worker in accelerators}
    return any(ATTENTION in row.evidence and not labels.isdisjoint(row.workers) for _, row in rows_of(forward))


def _may_fuse_attention(worker: ComparedWorker) -> bool:
    """Return whether torch was free to choose a fused kernel of attention on a worker."""
    return any(worker.info.in_force.get(f"sdpa_{kernel}") is True for kernel in FUSED_ATTENTION)


def _stages_not_soaked(workers: Sequence[ComparedWorker]) -> Iterator[str]:
    """Name the stages that the soak of no worker repeated."""
    soaks = [worker.info.soak for worker in workers if worker.info.soak is not None]
    stages = list(itertools.chain.from_iterable(soak.stages for soak in soaks))
    # a worker repeats only what its first run compared: copies between devices have no result on the CPU
    repeated = {stage.stage for stage in stages if stage.reason is None}
    not_soaked = dict.fromkeys(stage.stage for stage in stages if stage.stage not in repeated)
    if not_soaked:
        yield f"{', '.join(not_soaked)} during the soak"


def _dtype(requested: str, reference: ComparedWorker | None) -> str:
    """Return the dtype that the base was loaded in: as requested, or as the reference worker found in the files."""
    dtype_in_files = None if reference is None else reference.info.environment.get("dtype")
    return str(dtype_in_files) if requested == "auto" and dtype_in_files else requested


def _compare_load_path(
    load_path: str, members: Sequence[ComparedWorker], reference: ComparedWorker
) -> Iterator[TensorComparison]:
    """Yield every tensor that workers recorded on a load path, judged, by stage and in the model's order."""
    order: dict[Key, int] = {}
    # the reference worker's order comes first, where workers disagree
    for table in tables_of(member.records for member in (reference, *members)):
        for key, record in table.items():
            order.setdefault(key, record.order)
    stage_of = functools.cache(Members(members, reference).stage)
    for key in sorted(order, key=lambda key: (stage_order(key[0]), order[key])):
        stage, layer, tensor = key
        stage_members = stage_of(stage)
        record = stage_members.first_record(key)
        # a fact is about some devices: workers that have no such row lack nothing
        outcomes, workers = stage_members.outcomes(key, expected=record.rule != Rule.LIMIT)
        if not outcomes:
            continue
        # a word that accuses the model's code has another that accuses a device, for a result of one device alone
        if any(words.of_device(outcome.word) for outcome in outcomes):
            outcomes = accuse_devices(outcomes, members)
        yield TensorComparison(
            stage=stage,
            load_path=load_path,
            layer=layer,
            tensor=tensor,
            shape=record.shape,
            dtype=record.dtype,
            rule=record.rule,
            classes=stage_members.classes(key),
            outcomes=outcomes,
            workers=workers,
        )


def _is_incomplete(
    workers: Sequence[ComparedWorker], tensors: Sequence[TensorComparison], findings: Sequence[Finding]
) -> bool:
    """Return whether a part was not compared: agreement cannot be claimed then."""
    if not tensors or any(worker.info.status != "ok" for worker in workers):
        return True
    if any(finding.kind == kinds.NOTHING_COMPARED for finding in findings):
        return True
    return any(row.status == "blocked" for _, row in rows_of(tensors))


def _workers_with_mismatch(tensor: TensorComparison) -> Iterable[Workers]:
    return (outcome.workers for outcome in tensor.outcomes if outcome.status in BAD)


def _workers_with_other_bits(reference: ComparedWorker | None, tensor: TensorComparison) -> Iterable[Workers]:
    """Return the workers that differ bitwise from the reference worker, by class."""
    if reference is None or not tensor.classes or reference.label not in tensor.classes[0]:
        return ()
    return tensor.classes[1:]


def _first_divergences(
    tensors: Sequence[TensorComparison], diverging: Callable[[TensorComparison], Iterable[Workers]]
) -> tuple[Divergence, ...]:
    """Return, per worker and load path, the first tensor at which it diverges.

    Alternative paths are left out for a worker that diverges on a default one.

    Parameters
    ----------
    tensors : sequence of TensorComparison
        In the order of the comparison.
    diverging : callable
        Given a tensor, the sets of workers that diverge at it.
    """
    first_tensors = _first_tensors(tensors, diverging)
    diverges_on_default = {worker for worker, load_path in first_tensors if not is_alternative(load_path)}
    tensors_with_workers: dict[tuple[str, str, Status], tuple[TensorComparison, list[str]]] = {}
    for (worker, load_path), (tensor, status) in first_tensors.items():
        if not is_alternative(load_path) or worker not in diverges_on_default:
            key = (load_path, tensor.name, status)
            tensors_with_workers.setdefault(key, (tensor, []))[1].append(worker)
    return tuple(
        Divergence(
            workers=tuple(labels),
            load_path=tensor.load_path,
            stage=tensor.stage,
            layer=tensor.layer,
            tensor=tensor.tensor,
            status=status,
        )
        for (_, _, status), (tensor, labels) in tensors_with_workers.items()
    )


def _first_tensors(
    tensors: Sequence[TensorComparison], diverging: Callable[[TensorComparison], Iterable[Workers]]
) -> dict[tuple[str, str], tuple[TensorComparison, Status]]:
    """Return the first tensor at which each worker diverges on each load path, with its status there."""
    first_tensors: dict[tuple[str, str], tuple[TensorComparison, Status]] = {}
    # sets of workers that are dealt with, each with a load path: the same workers diverge at many tensors
    done: set[tuple[Workers, str]] = set()
    for tensor in tensors:
        load_path = tensor.load_path
        new_sets = [workers for workers in diverging(tensor) if (workers, load_path) not in done]
        if not new_sets:
            continue
        done.update((workers, load_path) for workers in new_sets)
        labels = {label for label in itertools.chain.from_iterable(new_sets) if (label, load_path) not in first_tensors}
        if not labels:
            continue
        for label, outcome in tensor.by_worker():
            if label in labels:
                first_tensors[label, load_path] = tensor, outcome.status
    return first_tensors


def _architectures(workers: Sequence[ComparedWorker]) -> tuple[ArchitectureGroup, ...]:
    """Return the architectures of the workers, in the order of the workers."""
    labels_by_architecture = group_by_key(dict.fromkeys((worker.info.architecture, worker.label) for worker in workers))
    return tuple(
        ArchitectureGroup(name=architecture, workers=tuple(labels))
        for architecture, labels in labels_by_architecture.items()
    )


def _summary(worker: ComparedWorker) -> WorkerSummary:
    """Return the fields of a worker that a report has, under its name in the comparison."""
    facts = {name: getattr(worker.info, name) for name in WorkerFacts.__struct_fields__}
    return WorkerSummary(**{**facts, "name": worker.label}, host=worker.capture.manifest.host, device=worker.device)
