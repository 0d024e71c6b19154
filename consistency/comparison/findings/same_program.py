"""Devices of one model that ran one program on the same bytes, and differ: the odd ones, where a majority agrees.

A majority is more than half of the devices that recorded the stage, agreeing bitwise in all of its tensors: no other
set of devices that agree can then be as large, and it would take as many devices with the same wrong bits to name the
wrong side. More than half of two is both: two devices, as any tie, name no side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consistency.capture.json_codec import encode_json
from consistency.capture.records import TensorRecord
from consistency.capture.wording import counted, some
from consistency.case.load_path import is_alternative
from consistency.case.stages import MOVES_WEIGHTS
from consistency.comparison.findings.in_common import Facts, clause, facts_of, in_common, lines
from consistency.comparison.findings.unordered import without_version
from consistency.comparison.kinds import FindingKind
from consistency.comparison.outcomes import WorkerSet
from consistency.comparison.records import Key, Records, tables_of
from consistency.comparison.result import BAD, Finding, TensorComparison, tensor_name
from consistency.comparison.site_groups import SiteGroups
from consistency.comparison.workers import ComparedWorker

_Bits = tuple[str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """The workers that differ from the majority, and those that agree with it."""

    odd: tuple[str, ...]
    others: tuple[str, ...]


def find_same_program(
    compared: Sequence[ComparedWorker],
    tensors: Sequence[TensorComparison],
    *,
    groups: SiteGroups,
    as_deployed: str,
) -> Iterable[Finding]:
    """Devices of one model that run one program on the same bytes are expected to agree bitwise."""
    for members in _programs(compared, tensors):
        recorded = tables_of(m.records for m in members)
        keys = list(dict.fromkeys(key for table in recorded for key, one in table.items() if one.rule != "bitwise"))
        suffix = as_deployed if any(not p.case.is_pinned for p in members) else ""
        facts: Facts = {}
        for stage in dict.fromkeys(key[0] for key in keys):
            tables = tables_of(Records({stage: m.records.stage(stage)}) for m in members)
            of_stage = [key for key in keys if key[0] == stage]
            differing = [key for key in of_stage if not _agree(tables, key)]
            unordered = [key for key in of_stage if key not in differing and not _agree(tables, key, promised=False)]
            if unordered:
                yield _unordered(members, stage, unordered, tables)
            if not differing:
                continue
            sides = _sides(members, stage, differing)
            if sides is None:
                yield _all_of(members, stage, differing, suffix)
            else:
                facts = facts or facts_of(members, groups)
                yield _odd_ones(sides, facts, stage, differing, suffix)


def _programs(
    compared: Sequence[ComparedWorker], tensors: Sequence[TensorComparison]
) -> Iterable[Sequence[ComparedWorker]]:
    """Return the workers that computed the same, where there are several."""
    carried = [t for t in tensors if t.stage in MOVES_WEIGHTS and not is_alternative(t.load_path)]
    off = WorkerSet()
    for outcome in (outcome for t in carried for outcome in t.outcomes if outcome.status in BAD):
        off.take(outcome.workers)
    found: dict[tuple[Any, ...], list[ComparedWorker]] = {}
    for p in compared:
        if p.program is not None and p.label not in off.names and p.info.status == "ok":
            found.setdefault((*p.program, p.info.inputs_digest, p.case.dtype, encode_json(p.info.config)), []).append(p)
    return [members for members in found.values() if len(members) > 1]


def _agree(tables: Sequence[Mapping[Key, TensorRecord]], key: Key, *, promised: bool = True) -> bool:
    """Return whether all digests of a tensor are equal; if `promised`, only those that are expected to be."""
    records = (table[key] for table in tables if key in table)
    digests = {record.promised_digest if promised else record.digest for record in records}
    return len(digests - {None}) <= 1


def _sides(members: Sequence[ComparedWorker], stage: str, differing: Sequence[Key]) -> _Sides | None:
    """Return the minority and the majority; None where no majority agrees.

    Each device has one vote, whatever its load paths, variants and captures, and none if these differ from each other.
    """
    by_table: dict[int, _Bits] = {}
    of_member: list[tuple[ComparedWorker, _Bits]] = []
    of_device: dict[str, dict[_Bits, None]] = {}
    known: dict[_Bits, _Bits] = {}
    for member in members:
        table = member.records.stage(stage)
        bits = by_table.get(id(table))
        if bits is None:
            found = tuple(table[key].promised_digest if key in table else None for key in differing)
            bits = by_table[id(table)] = known.setdefault(found, found)
        if any(digest is not None for digest in bits):
            of_member.append((member, bits))
            of_device.setdefault(member.device.partition("@")[0], {})[bits] = None
    votes = Counter(next(iter(found)) for found in of_device.values() if len(found) == 1)
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


def _all_of(members: Sequence[ComparedWorker], stage: str, differing: Sequence[Key], suffix: str) -> Finding:
    labels = tuple(dict.fromkeys(p.label for p in members))
    text = f"{stage} · {some(labels)} are of one device type with the same software, but differ bitwise"
    return Finding(
        kind=FindingKind.SAME_DEVICE_TYPE,
        severity="note" if suffix else "error",
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
        kind=FindingKind.SAME_DEVICE_TYPE,
        severity="note",
        message=f"{text} in {counted(len(differing), 'tensor')}{why}",
        general=f"{text}{why}",
        workers=labels,
        tensors=tuple(tensor_name(*key) for key in differing),
        detail=(f"first: {tensor_name(*differing[0])}",),
    )


def _odd_ones(sides: _Sides, facts: Facts, stage: str, differing: Sequence[Key], suffix: str) -> Finding:
    found = in_common(facts, sides.odd, sides.others)
    who = f"{stage} · {some(sides.odd)} {'differs' if len(sides.odd) == 1 else 'differ'} bitwise"
    others = f"{len(sides.others):,} {'other' if len(sides.others) == 1 else 'others'}"
    same = "of the same device type with the same software"
    return Finding(
        kind=FindingKind.SAME_DEVICE_TYPE,
        severity="note" if suffix else "error",
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
