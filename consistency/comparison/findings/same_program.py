"""Find devices of one model that ran the same program on the same bytes and differ; name the minority.

A majority is more than half of the devices that recorded the stage, agreeing bitwise in all of its tensors: no other
set of devices that agree can then be as large, and it would take as many devices with the same wrong bits to name the
wrong side. More than half of two is both: two devices, as any tie, name no side.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consistency.capture.json_codec import encode_json
from consistency.capture.records import TensorRecord
from consistency.capture.wording import counted, listed, some
from consistency.case.load_path import is_alternative
from consistency.case.stages import MOVES_WEIGHTS
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.findings.repeats import AS_DEPLOYED, without_version
from consistency.comparison.outcomes import group_by_key, union_of_workers
from consistency.comparison.records import Key, Records, StageTable, tables_of
from consistency.comparison.result import BAD, Finding, Severity, TensorComparison, rows_of, tensor_name
from consistency.comparison.site_groups import SiteGroups
from consistency.comparison.workers import ComparedWorker, labels_of

_Bits = tuple[str | None, ...]
"""Digests of some tensors on one worker, None where it recorded none."""
_DigestOf = Callable[[TensorRecord], str | None]

_RECORDED: _DigestOf = operator.attrgetter("digest")
_PROMISED: _DigestOf = operator.attrgetter("promised_digest")
_PROMISED_IN_GROUP: _DigestOf = operator.attrgetter("digest_in_group")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Disagreement:
    """Tensors of one stage in which workers differ bitwise though equal bits are expected of them."""

    workers: Sequence[ComparedWorker]
    stage: str
    keys: Sequence[Key]
    digest_of: _DigestOf  # returns the digest that these workers are expected to agree in


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """The workers that differ from the majority, and those that agree with it."""

    odd: tuple[str, ...]
    majority: tuple[str, ...]


def find_same_program(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report devices of one model that ran one program on the same bytes, and differ bitwise."""
    for members in _programs(evidence.workers, evidence.tensors):
        is_pinned = all(member.case.is_pinned for member in members)
        facts: Facts = {}
        for stage, keys in _computed_keys_by_stage(members).items():
            disagreements, unordered = _disagreements(members, stage, keys)
            if unordered:
                yield _report_unordered(members, stage, unordered)
            for disagreement in disagreements:
                sides = _sides(disagreement)
                if sides is None:
                    yield _report_all(disagreement, is_pinned=is_pinned)
                else:
                    # gathered only where there is something to tell apart: a fleet has thousands of workers
                    facts = facts or facts_of(members, evidence.groups)
                    yield _report_odd_ones(disagreement, sides, facts, is_pinned=is_pinned)


def _programs(
    compared: Sequence[ComparedWorker], tensors: Sequence[TensorComparison]
) -> Iterable[Sequence[ComparedWorker]]:
    """Return the workers that computed the same, where there are several.

    A worker whose weights are wrong is left out: it ran the program on other bytes.
    """
    weights = (tensor for tensor in tensors if tensor.stage in MOVES_WEIGHTS and not is_alternative(tensor.load_path))
    with_wrong_weights = union_of_workers(row.workers for _, row in rows_of(weights) if row.status in BAD)
    by_program: dict[tuple[Any, ...], list[ComparedWorker]] = {}
    for worker in compared:
        if worker.program is None or worker.label in with_wrong_weights or worker.info.status != "ok":
            continue
        program = (*worker.program, worker.info.inputs_digest, worker.case.dtype, encode_json(worker.info.config))
        by_program.setdefault(program, []).append(worker)
    return [members for members in by_program.values() if len(members) > 1]


def _computed_keys_by_stage(members: Sequence[ComparedWorker]) -> dict[str, list[Key]]:
    """Return the keys of the tensors that workers computed, by stage; bytes that were only moved are left out."""
    keys: dict[Key, None] = {}
    for table in tables_of(member.records for member in members):
        keys.update(dict.fromkeys(key for key, record in table.items() if record.rule != "bitwise"))
    return group_by_key((key[0], key) for key in keys)


def _disagreements(
    members: Sequence[ComparedWorker], stage: str, keys: Sequence[Key]
) -> tuple[list[_Disagreement], list[Key]]:
    """Return the disagreements of one stage, and the tensors that differ where no equal bits are expected.

    The latter come after an operation without a deterministic version. Among ranks of one group, which share each sum
    over ranks, equal bits are expected of some of them nevertheless.
    """
    tables = _tables_of_stage(members, stage)
    differing = [key for key in keys if not _agree(tables, key, _PROMISED)]
    differing_keys = frozenset(differing)
    unordered = [key for key in keys if key not in differing_keys and not _agree(tables, key, _RECORDED)]
    disagreements = []
    if differing:
        disagreements.append(_Disagreement(workers=members, stage=stage, keys=differing, digest_of=_PROMISED))
    if not unordered:
        return disagreements, unordered
    for ranks in _groups_of(members):
        tables_of_ranks = _tables_of_stage(ranks, stage)
        in_group = [key for key in unordered if not _agree(tables_of_ranks, key, _PROMISED_IN_GROUP)]
        if in_group:
            disagreements.append(_Disagreement(workers=ranks, stage=stage, keys=in_group, digest_of=_PROMISED_IN_GROUP))
            unordered = [key for key in unordered if key not in in_group]
    return disagreements, unordered


def _tables_of_stage(members: Sequence[ComparedWorker], stage: str) -> list[StageTable]:
    """Return the different tables of one stage."""
    return tables_of(Records({stage: member.records.stage(stage)}) for member in members)


def _groups_of(members: Sequence[ComparedWorker]) -> Iterable[Sequence[ComparedWorker]]:
    """Return the workers that ran side by side in one group, where there are several: of one capture and load path."""
    ranks = group_by_key(((str(member.capture.folder), member.load_path), member) for member in members)
    return [side_by_side for side_by_side in ranks.values() if len(side_by_side) > 1]


def _agree(tables: Sequence[Mapping[Key, TensorRecord]], key: Key, digest_of: _DigestOf) -> bool:
    """Return whether all digests of a tensor that `digest_of` returns are equal; a missing digest agrees."""
    digests = {digest_of(table[key]) for table in tables if key in table}
    return len(digests - {None}) <= 1


def _sides(disagreement: _Disagreement) -> _Sides | None:
    """Return the minority and the majority; None where no majority agrees, or nobody differs from it."""
    keys, digest_of = disagreement.keys, disagreement.digest_of

    @functools.cache  # workers that recorded the same share a table
    def bits_of(table: StageTable) -> _Bits:
        records = map(table.get, keys)
        return tuple(None if record is None else digest_of(record) for record in records)

    bits_of_workers = [(worker, bits_of(worker.records.stage(disagreement.stage))) for worker in disagreement.workers]
    # a worker that recorded none of these tensors has no vote
    bits_of_workers = [(worker, bits) for worker, bits in bits_of_workers if set(bits) != {None}]
    majority = _majority_bits(bits_of_workers)
    if majority is None:
        return None
    different_bits = dict.fromkeys(bits for _, bits in bits_of_workers)
    odd_bits = {bits for bits in different_bits if _contradict(bits, majority)}
    # bits with gaps may each agree with the majority, and still not with one another
    compatible_bits = [bits for bits in different_bits if bits not in odd_bits]
    digests_by_key = [set(digests) - {None} for digests in zip(*compatible_bits, strict=True)]
    if not odd_bits or any(len(digests) > 1 for digests in digests_by_key):
        return None
    odd = dict.fromkeys(worker.label for worker, bits in bits_of_workers if bits in odd_bits)
    agreeing = dict.fromkeys(
        worker.label for worker, bits in bits_of_workers if worker.label not in odd and bits == majority
    )
    return _Sides(odd=tuple(odd), majority=tuple(agreeing))


def _majority_bits(bits_of_workers: Sequence[tuple[ComparedWorker, _Bits]]) -> _Bits | None:
    """Return the bits that more than half of the devices have; None where there are no such bits.

    Each device has one vote, whatever its load paths, variants and captures, and none if these differ from each other.
    """
    bits_by_device = group_by_key(
        dict.fromkeys((worker.device.partition("@")[0], bits) for worker, bits in bits_of_workers)
    )
    votes = Counter(bits_of_device[0] for bits_of_device in bits_by_device.values() if len(bits_of_device) == 1)
    majority, count = max(votes.items(), key=lambda pair: pair[1], default=((), 0))
    return majority if 2 * count > len(bits_by_device) else None


def _contradict(bits: _Bits, majority: _Bits) -> bool:
    """Return whether the digests of any tensor differ; a digest that was not recorded is not known to differ."""
    pairs = zip(bits, majority, strict=True)
    return any(digest != expected and None not in (digest, expected) for digest, expected in pairs)


def _report_all(disagreement: _Disagreement, *, is_pinned: bool) -> Finding:
    """Report devices that differ, without a majority that could name a side."""
    keys = disagreement.keys
    labels, opening = _same_type(disagreement.workers, disagreement.stage)
    return Finding(
        kind=kinds.SAME_DEVICE_TYPE,
        severity=_severity(is_pinned),
        message=f"{opening} in {counted(len(keys), 'tensor')}{_suffix(is_pinned)}",
        general=opening,
        workers=labels,
        tensors=tuple(tensor_name(*key) for key in keys),
        detail=(f"first: {tensor_name(*keys[0])}",),
    )


def _report_unordered(members: Sequence[ComparedWorker], stage: str, keys: Sequence[Key]) -> Finding:
    """Note tensors that differ after an operation that need not give the same bits twice."""
    operations: dict[str, None] = {}
    tables = _tables_of_stage(members, stage)
    for key in keys:
        for table in tables:
            if key in table:
                operations.update(dict.fromkeys(table[key].nondeterministic))
    labels, opening = _same_type(members, stage)
    reason = without_version(operations)
    return Finding(
        kind=kinds.SAME_DEVICE_TYPE,
        severity="note",
        message=f"{opening} in {counted(len(keys), 'tensor')}{reason}",
        general=f"{opening}{reason}",
        workers=labels,
        tensors=tuple(tensor_name(*key) for key in keys),
        detail=(f"first: {tensor_name(*keys[0])}",),
    )


def _same_type(members: Sequence[ComparedWorker], stage: str) -> tuple[tuple[str, ...], str]:
    """Return the names of the workers, and the beginning of a finding that names all."""
    labels = labels_of(members)
    return labels, f"{stage} · {some(labels)} are of one device type with the same software, but differ bitwise"


def _report_odd_ones(disagreement: _Disagreement, sides: _Sides, facts: Facts, *, is_pinned: bool) -> Finding:
    """Report the workers that differ from a majority, and the facts that they have in common."""
    stage, keys = disagreement.stage, disagreement.keys
    shared_facts = in_common(facts, sides.odd, sides.majority)
    verb = "differs" if len(sides.odd) == 1 else "differ"
    opening = f"{stage} · {some(sides.odd)} {verb} bitwise"
    noun = "other" if len(sides.majority) == 1 else "others"
    majority = f"{len(sides.majority):,} {noun}"
    same = "of the same device type with the same software"
    ending = f"{clause(shared_facts, sides.odd)}{_suffix(is_pinned)}"
    return Finding(
        kind=kinds.SAME_DEVICE_TYPE,
        severity=_severity(is_pinned),
        message=f"{opening} in {counted(len(keys), 'tensor')} from {majority} {same}, which agree{ending}",
        general=f"{opening} from the majority {same}",
        workers=sides.odd,
        tensors=tuple(tensor_name(*key) for key in keys),
        detail=(
            f"first: {tensor_name(*keys[0])}",
            f"the others, which agree bitwise in {stage}: {some(sides.majority)}",
            *lines(shared_facts),
        ),
    )


def _severity(is_pinned: bool) -> Severity:
    """Return how bad different bits are: a profile that is not pinned promises no equal ones."""
    return "error" if is_pinned else "note"


def _suffix(is_pinned: bool) -> str:
    return "" if is_pinned else AS_DEPLOYED


_HOST, _PCI = "host", "PCI address"
_PLACES = frozenset({_HOST, _PCI})
"""Facts that say where a device is: of a single odd device they tell no more than its name does."""

_IDENTITY = frozenset({"device_uuid"})
_MOST_NAMED = 3
_MOST_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class InCommon:
    """A fact that all odd workers have in common."""

    fact: str  # name and value: `driver 580.95`
    having: int  # number of other workers that have the same value
    unknown: int  # number of other workers without a recorded value
    others: int  # number of other workers

    @property
    def line(self) -> str:
        """Return the fact with its counts."""
        recorded = self.others - self.unknown
        not_recorded = f"; not recorded of {self.unknown:,}" if self.unknown else ""
        return f"in common: {self.fact}, as {self.having or 'none'} of {recorded:,} others{not_recorded}"


Facts = Mapping[str, Mapping[str, str]]
"""Facts by name, by the name of the worker."""


def facts_of(workers: Iterable[ComparedWorker], groups: SiteGroups) -> dict[str, dict[str, str]]:
    """Return the facts of each worker that could tell it from others of its model; the site's groups first."""
    workers = list(workers)
    variable_names: set[str] = set()
    for worker in workers:
        variable_names.update(_variables(worker) or ())
    facts: dict[str, dict[str, str]] = {}
    for worker in workers:
        site_values = dict(groups.of(worker.capture) or {})
        recorded = {name: value for name, value in _recorded(worker).items() if name not in site_values}
        variables = _variables(worker)
        # of a worker that recorded its variables, one that is not among them was not set
        if variables is not None:
            recorded |= {f"variable {name}": str(variables.get(name, "not set")) for name in sorted(variable_names)}
        facts.setdefault(worker.label, site_values | recorded)
    return facts


def in_common(facts: Facts, odd: Sequence[str], majority: Collection[str]) -> list[InCommon]:
    """Return the facts that all odd workers and (almost) none of the majority have, those that none has first.

    Parameters
    ----------
    facts : mapping
        Facts of all these workers.
    odd, majority : names of workers
        One odd worker or more.
    """
    shared_facts = []
    for name, value in facts[odd[0]].items():
        if any(facts[worker].get(name) != value for worker in odd):
            continue
        values = Counter(facts[worker].get(name) for worker in majority)
        unknown = values.pop(None, 0)
        having = values.get(value, 0)
        # a fact that differs from device to device anyway tells nothing of one of them
        is_telling = len(odd) > 1 or (name not in _PLACES and max(values.values(), default=0) > 1)
        if is_telling and having < len(odd) and unknown < len(majority):
            shared_facts.append(InCommon(fact=f"{name} {value}", having=having, unknown=unknown, others=len(majority)))
    return sorted(shared_facts, key=lambda shared: shared.having)


def clause(shared_facts: Sequence[InCommon], odd: Sequence[str]) -> str:
    """Return the end of the sentence of a finding, which states the facts; empty where nothing is in common."""
    if not shared_facts:
        return ""
    subject = "it has" if len(odd) == 1 else "all of them have"
    exclusive = [shared for shared in shared_facts if not shared.having][:_MOST_NAMED]
    if not exclusive:
        first = shared_facts[0]
        sharing = "1 other has it too" if first.having == 1 else f"{first.having} others have it too"
        return f"; {subject} {first.fact}, and {sharing}"
    verb = "is known to have" if any(shared.unknown for shared in exclusive) else "has"
    return f"; {subject} {listed([shared.fact for shared in exclusive])}, and no other {verb}"


def lines(shared_facts: Sequence[InCommon]) -> tuple[str, ...]:
    """Return the lines of detail that state the facts."""
    if not shared_facts:
        return ("no recorded fact sets them apart",)
    return tuple(shared.line for shared in shared_facts[:_MOST_LINES])


def find_unknown_hosts(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report a file of groups that names no host of the comparison."""
    compared, groups = evidence.workers, evidence.groups
    if groups.hosts and compared and all(groups.of(worker.capture) is None for worker in compared):
        host = compared[0].capture.manifest.host
        yield Finding(
            kind=kinds.UNKNOWN_HOSTS,
            severity="note",
            message=f"--groups {groups.path} names none of the compared hosts, such as {host}: it was not used",
        )


def _variables(worker: ComparedWorker) -> Mapping[str, object] | None:
    """Return the environment variables that were set, by name; None where the worker did not record them."""
    variables = worker.info.environment.get("variables")
    return variables if isinstance(variables, dict) else None


def _recorded(worker: ComparedWorker) -> dict[str, str]:
    """Return the facts that a capture has of a worker; those that decide its program are equal within a model."""
    manifest, info = worker.capture.manifest, worker.info
    facts: dict[str, object] = {_HOST: manifest.host, "driver": info.driver, _PCI: info.pci_bus_id}
    host_facts = manifest.host_facts
    gpu = None if host_facts is None else host_facts.gpu(info.name.partition("@")[0])
    if gpu is not None:
        facts |= {
            "driver": info.driver or gpu.driver,
            _PCI: info.pci_bus_id or gpu.pci_bus_id,
            "VBIOS": gpu.vbios,
            "board": gpu.board,
            "NUMA node": gpu.numa_node,
            "IOMMU type": gpu.iommu_type,
            "PCIe lanes": gpu.link.get("width"),
            "NVLinks": gpu.nvlinks,
        }
    if host_facts is not None:
        facts |= {
            "kernel": host_facts.kernel,
            "IOMMU": host_facts.iommu,
            "IOMMU options": " ".join(host_facts.iommu_options) or "none",
        }
    facts["consistency"] = manifest.tool
    for name, value in info.environment.items():
        if name not in _IDENTITY and isinstance(value, (str, int, float)):
            facts.setdefault(name, value)
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


FINDERS = (
    Finder(name="devices of one model", phase=Phase.AGREEMENT, position=2, find=find_same_program),
    Finder(name="unknown hosts", phase=Phase.HOSTS, position=3, find=find_unknown_hosts),
)
