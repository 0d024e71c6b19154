"""Devices of one model that ran one program on the same bytes, and differ: the odd ones, where a majority agrees.

A majority is more than half of the devices that recorded the stage, agreeing bitwise in all of its tensors: no other
set of devices that agree can then be as large, and it would take as many devices with the same wrong bits to name the
wrong side. More than half of two is both: two devices, as any tie, name no side.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from consistency.comparison.outcomes import gathered, names_in
from consistency.comparison.records import Key, Records, StageTable, tables_of
from consistency.comparison.result import BAD, Finding, Severity, TensorComparison, tensor_name
from consistency.comparison.site_groups import SiteGroups
from consistency.comparison.workers import ComparedWorker

_Bits = tuple[str | None, ...]
_DigestOf = Callable[[TensorRecord], str | None]

_RECORDED: _DigestOf = operator.attrgetter("digest")
_PROMISED: _DigestOf = operator.attrgetter("promised_digest")
_PROMISED_IN_GROUP: _DigestOf = operator.attrgetter("digest_in_group")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """The workers that differ from the majority, and those that agree with it."""

    odd: tuple[str, ...]
    others: tuple[str, ...]


def find_same_program(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Devices of one model that run one program on the same bytes are expected to agree bitwise."""
    for members in _programs(evidence.workers, evidence.tensors):
        recorded = tables_of(m.records for m in members)
        keys = list(dict.fromkeys(key for table in recorded for key, one in table.items() if one.rule != "bitwise"))
        is_pinned = all(p.case.is_pinned for p in members)
        severity: Severity = "error" if is_pinned else "note"
        suffix = "" if is_pinned else AS_DEPLOYED
        facts: Facts = {}
        for stage in dict.fromkeys(key[0] for key in keys):
            tables = tables_of(Records({stage: m.records.stage(stage)}) for m in members)
            of_stage = [key for key in keys if key[0] == stage]
            differing = [key for key in of_stage if not _agree(tables, key, _PROMISED)]
            unordered = [key for key in of_stage if key not in differing and not _agree(tables, key, _RECORDED)]
            accused = [(members, differing, _PROMISED)] if differing else []
            for ranks in _groups_of(members) if unordered else ():
                of_ranks = tables_of(Records({stage: m.records.stage(stage)}) for m in ranks)
                in_group = [key for key in unordered if not _agree(of_ranks, key, _PROMISED_IN_GROUP)]
                if in_group:
                    accused.append((ranks, in_group, _PROMISED_IN_GROUP))
                    unordered = [key for key in unordered if key not in in_group]
            if unordered:
                yield _unordered(members, stage, unordered, tables)
            for workers, of_workers, digest_of in accused:
                sides = _sides(workers, stage, of_workers, digest_of)
                if sides is None:
                    yield _all_of(workers, stage, of_workers, severity, suffix)
                else:
                    facts = facts or facts_of(members, evidence.groups)
                    yield _odd_ones(sides, facts, stage, of_workers, severity, suffix)


def _programs(
    compared: Sequence[ComparedWorker], tensors: Sequence[TensorComparison]
) -> Iterable[Sequence[ComparedWorker]]:
    """Return the workers that computed the same, where there are several."""
    carried = [t for t in tensors if t.stage in MOVES_WEIGHTS and not is_alternative(t.load_path)]
    off = names_in(outcome.workers for t in carried for outcome in t.outcomes if outcome.status in BAD)
    found: dict[tuple[Any, ...], list[ComparedWorker]] = {}
    for p in compared:
        if p.program is not None and p.label not in off and p.info.status == "ok":
            found.setdefault((*p.program, p.info.inputs_digest, p.case.dtype, encode_json(p.info.config)), []).append(p)
    return [members for members in found.values() if len(members) > 1]


def _groups_of(members: Sequence[ComparedWorker]) -> Iterable[Sequence[ComparedWorker]]:
    """Return the workers that ran side by side in one group, where there are several: of one capture and load path."""
    ranks = gathered(((str(member.capture.folder), member.load_path), member) for member in members)
    return [side_by_side for side_by_side in ranks.values() if len(side_by_side) > 1]


def _agree(tables: Sequence[Mapping[Key, TensorRecord]], key: Key, digest_of: _DigestOf) -> bool:
    """Return whether all digests of a tensor are equal, of those that `digest_of` returns."""
    digests = {digest_of(table[key]) for table in tables if key in table}
    return len(digests - {None}) <= 1


def _sides(
    members: Sequence[ComparedWorker], stage: str, differing: Sequence[Key], digest_of: _DigestOf
) -> _Sides | None:
    """Return the minority and the majority; None where no majority agrees.

    Each device has one vote, whatever its load paths, variants and captures, and none if these differ from each other.
    """

    @functools.cache  # workers that saw the same share a table
    def bits_of(table: StageTable) -> _Bits:
        return tuple(digest_of(table[key]) if key in table else None for key in differing)

    every = ((member, bits_of(member.records.stage(stage))) for member in members)
    of_member = [(member, bits) for member, bits in every if {*bits} != {None}]
    known = dict.fromkeys(bits for _, bits in of_member)
    of_device = gathered(dict.fromkeys((member.device.partition("@")[0], bits) for member, bits in of_member))
    votes = Counter(found[0] for found in of_device.values() if len(found) == 1)
    usual, count = max(votes.items(), key=lambda pair: pair[1], default=((), 0))
    if 2 * count <= len(of_device):
        return None
    # what was not recorded is not known to differ
    odd_bits = {bits for bits in known if any(a != b and None not in (a, b) for a, b in zip(bits, usual, strict=True))}
    left = [set(at_key) - {None} for at_key in zip(*(bits for bits in known if bits not in odd_bits), strict=True)]
    if not odd_bits or any(len(digests) > 1 for digests in left):
        return None
    odd = dict.fromkeys(member.label for member, bits in of_member if bits in odd_bits)
    others = dict.fromkeys(member.label for member, bits in of_member if member.label not in odd and bits == usual)
    return _Sides(odd=tuple(odd), others=tuple(others))


def _all_of(
    members: Sequence[ComparedWorker], stage: str, differing: Sequence[Key], severity: Severity, suffix: str
) -> Finding:
    labels = tuple(dict.fromkeys(p.label for p in members))
    text = f"{stage} · {some(labels)} are of one device type with the same software, but differ bitwise"
    return Finding(
        kind=kinds.SAME_DEVICE_TYPE,
        severity=severity,
        message=f"{text} in {counted(len(differing), 'tensor')}{suffix}",
        general=text,
        workers=labels,
        tensors=tuple(tensor_name(*key) for key in differing),
        detail=(f"first: {tensor_name(*differing[0])}",),
    )


def _unordered(
    members: Sequence[ComparedWorker],
    stage: str,
    differing: Sequence[Key],
    tables: Sequence[Mapping[Key, TensorRecord]],
) -> Finding:
    """Note what differs after an operation that need not give the same bits twice."""
    names = dict.fromkeys(
        name for key in differing for table in tables if key in table for name in table[key].nondeterministic
    )
    labels = tuple(dict.fromkeys(p.label for p in members))
    text = f"{stage} · {some(labels)} are of one device type with the same software, but differ bitwise"
    why = without_version(names)
    return Finding(
        kind=kinds.SAME_DEVICE_TYPE,
        severity="note",
        message=f"{text} in {counted(len(differing), 'tensor')}{why}",
        general=f"{text}{why}",
        workers=labels,
        tensors=tuple(tensor_name(*key) for key in differing),
        detail=(f"first: {tensor_name(*differing[0])}",),
    )


def _odd_ones(
    sides: _Sides, facts: Facts, stage: str, differing: Sequence[Key], severity: Severity, suffix: str
) -> Finding:
    found = in_common(facts, sides.odd, sides.others)
    who = f"{stage} · {some(sides.odd)} {'differs' if len(sides.odd) == 1 else 'differ'} bitwise"
    others = f"{len(sides.others):,} {'other' if len(sides.others) == 1 else 'others'}"
    same = "of the same device type with the same software"
    return Finding(
        kind=kinds.SAME_DEVICE_TYPE,
        severity=severity,
        message=(
            f"{who} in {counted(len(differing), 'tensor')} from {others} {same}, which agree"
            f"{clause(found, sides.odd)}{suffix}"
        ),
        general=f"{who} from the majority {same}",
        workers=sides.odd,
        tensors=tuple(tensor_name(*key) for key in differing),
        detail=(
            f"first: {tensor_name(*differing[0])}",
            f"the others, which agree bitwise in {stage}: {some(sides.others)}",
            *lines(found),
        ),
    )


_HOST, _PCI = "host", "PCI address"
_PLACES = frozenset({_HOST, _PCI})
"""Facts that name a single device as much as its own name does, and so tell nothing of one odd device alone."""

_IDENTITY = frozenset({"device_uuid"})
_MOST_NAMED = 3
_MOST_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class InCommon:
    """A value that all odd ones have."""

    fact: str  # name and value: `driver 580.95`
    # having, unknown, others: how many others have it too, of how many it is not recorded, and how many there are
    having: int
    unknown: int
    others: int

    @property
    def line(self) -> str:
        """Return it with its counts."""
        known = self.others - self.unknown
        not_recorded = f"; not recorded of {self.unknown:,}" if self.unknown else ""
        return f"in common: {self.fact}, as {self.having or 'none'} of {known:,} others{not_recorded}"


Facts = Mapping[str, Mapping[str, str]]
"""Facts by name, by the name of the worker."""


def facts_of(workers: Iterable[ComparedWorker], groups: SiteGroups) -> dict[str, dict[str, str]]:
    """Return what is known of each worker that could tell it from others of its model; the site's groups first."""
    workers = list(workers)
    names = {name for worker in workers for name in _variables(worker) or ()}
    found: dict[str, dict[str, str]] = {}
    for worker in workers:
        site = dict(groups.of(worker.capture) or {})
        recorded = {name: value for name, value in _recorded(worker).items() if name not in site}
        variables = _variables(worker)
        if variables is not None:
            recorded |= {f"variable {name}": str(variables.get(name, "not set")) for name in sorted(names)}
        found.setdefault(worker.label, site | recorded)
    return found


def in_common(facts: Facts, odd: Sequence[str], others: Collection[str]) -> list[InCommon]:
    """Return the values that all odd ones have and (almost) none of the others, those that none has first."""
    found = []
    for name, value in facts[odd[0]].items():
        if any(facts[worker].get(name) != value for worker in odd):
            continue
        values = Counter(facts[worker].get(name) for worker in others)
        unknown = values.pop(None, 0)
        having = values.get(value, 0)
        # what differs from device to device anyway tells nothing of one of them
        tells = len(odd) > 1 or (name not in _PLACES and max(values.values(), default=0) > 1)
        if tells and having < len(odd) and unknown < len(others):
            found.append(InCommon(fact=f"{name} {value}", having=having, unknown=unknown, others=len(others)))
    return sorted(found, key=lambda one: one.having)


def clause(found: Sequence[InCommon], odd: Sequence[str]) -> str:
    """Return what follows in the sentence of a finding; empty where nothing is in common."""
    if not found:
        return ""
    who = "it has" if len(odd) == 1 else "all of them have"
    alone = [one for one in found if not one.having][:_MOST_NAMED]
    if not alone:
        first = found[0]
        too = "1 other has it too" if first.having == 1 else f"{first.having} others have it too"
        return f"; {who} {first.fact}, and {too}"
    known = " is known to have" if any(one.unknown for one in alone) else " has"
    return f"; {who} {listed([one.fact for one in alone])}, and no other{known}"


def lines(found: Sequence[InCommon]) -> tuple[str, ...]:
    """Return the lines of detail."""
    return tuple(one.line for one in found[:_MOST_LINES]) or ("no recorded fact sets them apart",)


def find_unknown_hosts(evidence: ComparisonEvidence) -> Iterable[Finding]:
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
    """Return the environment variables that were recorded; those that are not in it were not set."""
    found = worker.info.environment.get("variables")
    return found if isinstance(found, dict) else None


def _recorded(worker: ComparedWorker) -> dict[str, str]:
    """Return the facts that a capture has of a worker; those that decide its program are equal within a model."""
    manifest, info = worker.capture.manifest, worker.info
    found: dict[str, object] = {_HOST: manifest.host, "driver": info.driver, _PCI: info.pci_bus_id}
    host = manifest.host_facts
    gpu = None if host is None else host.gpu(info.name.partition("@")[0])
    if gpu is not None:
        found |= {
            "driver": info.driver or gpu.driver,
            _PCI: info.pci_bus_id or gpu.pci_bus_id,
            "VBIOS": gpu.vbios,
            "board": gpu.board,
            "NUMA node": gpu.numa_node,
            "IOMMU type": gpu.iommu_type,
            "PCIe lanes": gpu.link.get("width"),
            "NVLinks": gpu.nvlinks,
        }
    if host is not None:
        found |= {"kernel": host.kernel, "IOMMU": host.iommu, "IOMMU options": " ".join(host.iommu_options) or "none"}
    found["consistency"] = manifest.tool
    for name, value in info.environment.items():
        if name not in _IDENTITY and isinstance(value, (str, int, float)):
            found.setdefault(name, value)
    return {name: str(value) for name, value in found.items() if value not in (None, "")}


FINDERS = (
    Finder(name="devices of one model", phase=Phase.AGREEMENT, position=2, find=find_same_program),
    Finder(name="unknown hosts", phase=Phase.HOSTS, position=3, find=find_unknown_hosts),
)
