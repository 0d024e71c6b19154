"""Captures -> Comparison: align the workers tensor by tensor, judge every row, and collect the findings.

The same code compares the workers of one run, captures from ten hosts, and captures from different days.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from consistency.capture.folder import Capture, capture_name
from consistency.capture.names import WHOLE_MODEL
from consistency.capture.records import TensorRecord, WorkerFacts
from consistency.case.case import Case
from consistency.case.load_path import SIDES, is_alternative
from consistency.case.stages import Stage
from consistency.comparison.findings.collect import find
from consistency.comparison.findings.nothing_compared import NOTHING_COMPARED
from consistency.comparison.judge import PAYLOAD, is_as_sent, judge
from consistency.comparison.result import (
    BAD,
    ArchitectureGroup,
    Comparison,
    Divergence,
    Finding,
    Row,
    Source,
    TensorComparison,
    WorkerSummary,
    verdict_of,
)
from consistency.comparison.workers import ComparedWorker, Key, choose_reference, gather, load_paths_of, on_load_path
from consistency.errors import UsageError
from consistency.numerics.rules import Rule

VERSIONS = ("python", "torch", "transformers", "peft", "safetensors", "accelerate", "numpy", "cuda")
"""Names in a worker's environment that the head of a report states."""

_STAGE_ORDER = {stage.value: place for place, stage in enumerate(Stage)}


def compare(captures: Sequence[Capture], *, unread: Sequence[str] = ()) -> Comparison:
    """Compare the workers of one or more captures.

    The first capture's reference worker is the reference.

    Parameters
    ----------
    captures : sequence of Capture
        One or more; `UsageError` where there is none.
    unread : sequence of str
        Why captures could not be read at all.
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
    findings = find(workers, reference, tensors, hosts=hosts, damage=damage)
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
        first_other_bits=_first(tensors, functools.partial(_other_bits, reference)),
        not_looked_at=(*first.not_looked_at(), *_load_paths_not_checked(first, load_paths), *_not_soaked(workers)),
        profile=" and ".join(dict.fromkeys(capture.manifest.case.profile for capture in captures)),
        settings=tuple(dict.fromkeys(str(one) for capture in captures for one in capture.manifest.case.settings)),
        simulated=any(p.info.simulated for p in workers),
        hosts=hosts,
        versions=_versions(workers),
        planted=tuple(f"{p.info.planted} in {p.label}" for p in workers if p.info.planted is not None),
        sources=tuple(map(_source, captures)),
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
        name=capture_name(capture.folder), created=manifest.created, host=manifest.host, tool=manifest.tool,
        command=manifest.command,
    )  # fmt: skip


def _load_paths_not_checked(case: Case, taken: Sequence[str]) -> Iterable[str]:
    """Name the alternative paths that were not checked, where there is an adapter to load."""
    if case.adapter is None or Stage.ADAPTER not in case.stages:
        return
    left = [f"+{side}" for side in SIDES if side not in {load_path.partition("+")[2] for load_path in taken}]
    if left:
        yield "the adapter's alternative load paths" if len(left) == len(SIDES) else f"the load paths {' '.join(left)}"


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
    for member in (reference, *members):
        for key, record in member.records.items():
            order.setdefault(key, record.order)
    kinds = [member.kind() for member in members]
    equal: dict[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]] = {}  # one tuple for all tensors of a stage
    for key in sorted(order, key=lambda k: (_STAGE_ORDER.get(k[0], len(_STAGE_ORDER)), order[k])):
        record = reference.records.get(key) or next(m.records[key] for m in members if key in m.records)
        rows = _judge_all(members, kinds, reference, key, expected=record.rule != Rule.LIMIT)
        if not rows:
            continue
        classes = _classes(members, reference, key)
        yield TensorComparison(
            stage=key[0],
            load_path=load_path,
            layer=key[1],
            tensor=key[2],
            shape=record.shape,
            dtype=record.dtype,
            rule=record.rule,
            classes=equal.setdefault(classes, classes),
            rows=rows,
            order=order[key],
        )


def _judge_all(
    members: Sequence[ComparedWorker], kinds: Sequence[bytes], reference: ComparedWorker, key: Key, *, expected: bool
) -> tuple[Row, ...]:
    """Judge each worker's record of a tensor; of workers of one kind that share a record, one is judged for all.

    A record is `expected` of every worker, unless it is a fact: the other workers have other devices.
    """
    judged: dict[tuple[int, bytes], Row] = {}
    rows = []
    for member, kind in zip(members, kinds, strict=True):
        record = member.records.get(key)
        if record is None:
            if expected and _should_have(member, reference, key):
                rows.append(judge(member, reference, key))
            continue
        known = judged.get((id(record), kind))
        if known is not None:
            rows.append(msgspec.structs.replace(known, worker=member.label))
            continue
        row = judge(member, reference, key)
        if row.unread is not True:  # another capture may still have the stored tensor that this one has lost
            judged[id(record), kind] = row
        rows.append(row)
    return tuple(rows)


def _should_have(member: ComparedWorker, reference: ComparedWorker, key: Key) -> bool:
    """Return whether a worker should have a record of a tensor: its case has the stage, at the same level."""
    if key[0] == Stage.TRANSFER:  # each worker records the copies into its own device
        return False
    if key[1] == WHOLE_MODEL or not member.could_have(key):  # a stage that others skipped as a whole
        return False
    return member.capture is reference.capture or member.case.level == reference.case.level


def _classes(members: Sequence[ComparedWorker], reference: ComparedWorker, key: Key) -> tuple[tuple[str, ...], ...]:
    """Group the workers that recorded the tensor by its digest, the reference's class first."""
    classes: dict[str | None, list[str]] = {}
    own = reference.records.get(key)
    if own is not None and own.digest is not None:
        classes[_bits(own)] = [reference.label]
    for member in members:
        record = member.records.get(key)
        if record is not None and record.digest is not None and member is not reference:
            classes.setdefault(_bits(record), []).append(member.label)
    return tuple(tuple(names) for names in classes.values())


def _bits(record: TensorRecord) -> str | None:
    """Return what makes workers agree: the digest; for copies, that they arrived as sent."""
    return PAYLOAD if record.stage == Stage.TRANSFER and is_as_sent(record) else record.digest


def _is_incomplete(
    workers: Sequence[ComparedWorker], tensors: Sequence[TensorComparison], findings: Sequence[Finding]
) -> bool:
    lost = any(worker.info.status != "ok" for worker in workers)
    lost = lost or any(finding.kind == NOTHING_COMPARED for finding in findings)
    return lost or not tensors or any(row.status == "blocked" for tensor in tensors for row in tensor.rows)


def _bad(tensor: TensorComparison) -> Collection[str]:
    return {row.worker for row in tensor.rows if row.status in BAD}


def _other_bits(reference: ComparedWorker | None, tensor: TensorComparison) -> Collection[str]:
    """Return the workers that differ bitwise from the reference worker."""
    if reference is None or not tensor.classes or reference.label not in tensor.classes[0]:
        return ()
    return {name for names in tensor.classes[1:] for name in names}


def _first(
    tensors: Sequence[TensorComparison], leave: Callable[[TensorComparison], Collection[str]]
) -> tuple[Divergence, ...]:
    """Return, per worker and load path, the first tensor at which it diverges.

    Alternative paths are left out for a worker that diverges on a default one.
    """
    found: dict[tuple[str, str], Divergence] = {}
    for tensor in tensors:
        names = leave(tensor)
        if not names:
            continue
        for row in tensor.rows:
            if row.worker in names and (row.worker, tensor.load_path) not in found:
                found[row.worker, tensor.load_path] = Divergence(
                    worker=row.worker, load_path=tensor.load_path, stage=tensor.stage, layer=tensor.layer,
                    tensor=tensor.tensor, status=row.status,
                )  # fmt: skip
    on_default = {worker for worker, load_path in found if not is_alternative(load_path)}
    return tuple(
        d for (worker, load_path), d in found.items() if not is_alternative(load_path) or worker not in on_default
    )


def _architectures(workers: Sequence[ComparedWorker]) -> tuple[ArchitectureGroup, ...]:
    groups: dict[str, dict[str, None]] = {}
    for p in workers:
        groups.setdefault(p.info.architecture, {})[p.label] = None
    return tuple(ArchitectureGroup(name=name, workers=tuple(labels)) for name, labels in groups.items())


def _summary(worker: ComparedWorker) -> WorkerSummary:
    facts = {name: getattr(worker.info, name) for name in WorkerFacts.__struct_fields__}
    return WorkerSummary(**{**facts, "name": worker.label}, host=worker.capture.manifest.host, device=worker.device)
