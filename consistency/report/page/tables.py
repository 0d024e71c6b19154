"""What the page of a run draws beside its map: who agrees with whom, histograms, environments, memory by stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consistency.capture.records import StageMemory
from consistency.capture.wording import size
from consistency.comparison.result import Comparison, TensorComparison, WorkerSummary
from consistency.report.marks import letter

MOST_PARTITIONS = 6
"""Partitions per stage; a fleet without agreement may have one per tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Classes of workers that agree bitwise, and the tensors of a stage in which they do, of so many."""

    stage: str
    load_path: str
    tensors: int
    of: int
    first: str
    classes: tuple[tuple[str, ...], ...]


def partitions(tensors: Sequence[TensorComparison]) -> tuple[list[Partition], int]:
    """Return the most common partitions, stage by stage, and how many are left out."""
    found: dict[tuple[str, str], dict[tuple[tuple[str, ...], ...], list[TensorComparison]]] = {}
    for tensor in tensors:
        if tensor.classes:
            by_classes = found.setdefault((tensor.load_path, tensor.stage), {})
            by_classes.setdefault(tensor.classes, []).append(tensor)
    drawn: list[Partition] = []
    left_out = 0
    for (load_path, stage), ways in found.items():
        of = sum(map(len, ways.values()))
        ranked = sorted(ways.items(), key=lambda way: -len(way[1]))
        left_out += len(ranked[MOST_PARTITIONS:])
        drawn += [
            Partition(
                stage=stage,
                load_path=load_path,
                tensors=len(same),
                of=of,
                first=f"{same[0].layer}.{same[0].tensor}",
                classes=classes,
            )
            for classes, same in ranked[:MOST_PARTITIONS]
        ]
    return drawn, left_out


_TENTHS = tuple(i / 10 for i in range(1, 11))
_ABOVE = (2.0, 10.0, 100.0, math.inf)

FIELDS: Mapping[str, tuple[int, int]] = {
    "float64": (11, 52),
    "float32": (8, 23),
    "float16": (5, 10),
    "bfloat16": (8, 7),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}
"""Bits of exponent and of fraction; IEEE 754-2019 table 3.5, the bfloat16 of Intel, the OCP's 8-bit formats."""

_WIDEST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Rows whose error/tolerance is in a range; `share` is relative to the fullest bin, for the length of its bar."""

    label: str
    count: int
    share: float
    outside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Error/tolerance of the rows of a stage."""

    stage: str
    rows: int
    tensors: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bit:
    """One bit of a dtype: in how many elements it differed."""

    place: int
    field: str
    count: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """Which bits of a dtype differed, the highest first."""

    dtype: str
    tensors: int
    rows: int
    bits: tuple[Bit, ...]


def ratios(tensors: Iterable[TensorComparison]) -> list[Ratios]:
    """Count the rows of each stage by error/tolerance, in tenths up to 1."""
    edges = (*_TENTHS, *_ABOVE)
    counts: dict[str, list[int]] = {}
    seen: dict[str, int] = {}
    for tensor in tensors:
        found: Counter[float] = Counter()
        for outcome in tensor.outcomes:
            if outcome.share is not None:
                found[outcome.share] += len(outcome.workers)
        if not found:
            continue
        seen[tensor.stage] = seen.get(tensor.stage, 0) + 1
        into = counts.setdefault(tensor.stage, [0] * (len(edges) + 1))
        for ratio, count in found.items():
            into[_bin(float(ratio), edges)] += count
    return [
        Ratios(stage=stage, rows=sum(some), tensors=seen[stage], bins=tuple(_bins(some)))
        for stage, some in counts.items()
    ]


def _bin(ratio: float, edges: Sequence[float]) -> int:
    if math.isnan(ratio):
        return len(edges)
    if ratio <= 1:
        return max(0, math.ceil(ratio * 10) - 1)  # the tenths, without a search
    return next(place for place, edge in enumerate(edges) if ratio <= edge)


def _bins(counts: Sequence[int]) -> Iterable[Bin]:
    labels = [f"{edge - 0.1:.1f} – {edge:.1f}" for edge in _TENTHS]
    labels += ["1 – 2", "2 – 10", "10 – 100", "over 100", "NaN"]
    most = max(counts)
    for place, (label, count) in enumerate(zip(labels, counts, strict=True)):
        outside = place >= len(_TENTHS)
        if count or not outside:  # bins above 1 are shown only where they have rows
            yield Bin(label=label, count=count, share=count / most, outside=outside)


def bits(tensors: Iterable[TensorComparison]) -> list[Bits]:
    """Count, by dtype, in how many elements each bit differed, over all rows that recorded it."""
    counts: dict[str, list[int]] = {}
    seen: dict[str, list[int]] = {}
    for tensor in tensors:
        rows = 0
        for evidence, workers in ((one.evidence, one.workers) for one in tensor.outcomes if one.evidence):
            found = evidence.get("flipped_bits")
            if isinstance(found, dict) and found:
                rows += len(workers)
                into = counts.setdefault(tensor.dtype, [0] * _WIDEST)
                for place, count in found.items():
                    if str(place).isdecimal() and int(place) < _WIDEST and type(count) is int and count > 0:
                        into[int(place)] += count * len(workers)
        if rows:
            of = seen.setdefault(tensor.dtype, [0, 0])
            of[0] += 1
            of[1] += rows
    return [
        Bits(dtype=dtype, tensors=seen[dtype][0], rows=seen[dtype][1], bits=tuple(_bits(dtype, some)))
        for dtype, some in counts.items()
        if any(some)
    ]


def _bits(dtype: str, counts: Sequence[int]) -> Iterable[Bit]:
    exponent, fraction = FIELDS.get(dtype, (0, 0))
    width = 1 + exponent + fraction if exponent else 1 + max(p for p, count in enumerate(counts) if count)
    most = max(counts)
    for place in reversed(range(width)):
        field = "bit"
        if exponent:
            field = "fraction" if place < fraction else "exponent" if place < fraction + exponent else "sign"
        yield Bit(place=place, field=field, count=counts[place], share=counts[place] / most)


MOST_ENVIRONMENTS = 12
"""Distinct environments side by side: a screen's width."""

_ABSENT = "missing"

_IDENTITY = frozenset({"device_uuid", "variables.CUDA_VISIBLE_DEVICES"})
"""Identifies a device, so it would give each one a column; the table of workers has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Settings line by line; workers with the same environment share a column."""

    columns: list[list[str]]  # names of workers
    # name of a setting and, by column, letter and text; equal values of a line have equal letters
    differing: list[tuple[str, list[tuple[str, str]]]]
    same: list[tuple[str, str]]  # name of a setting and its only value
    left_out: int  # workers of environments for which there is no column


def environments(workers: Sequence[WorkerSummary]) -> Environments:
    """Compare the workers' environments, setting by setting."""
    equal: dict[tuple[tuple[str, str], ...], list[str]] = {}
    # of a fleet every host would be a column; the table of workers has their names
    left = {"host"} if len({worker.host for worker in workers}) > MOST_ENVIRONMENTS else set()
    for worker in workers:
        found = tuple((name, text) for name, text in flat(worker) if name not in left)
        equal.setdefault(found, []).append(worker.name)
    chosen = [(dict(items), names) for items, names in equal.items()][:MOST_ENVIRONMENTS]
    differing, same = [], []
    for name in dict.fromkeys(name for found, _ in chosen for name in found):
        texts = [found.get(name, _ABSENT) for found, _ in chosen]
        letters = {text: letter(number) for number, text in enumerate(dict.fromkeys(texts))}
        if len(letters) > 1:
            differing.append((name, [(letters[text], text) for text in texts]))
        else:
            same.append((name, texts[0]))
    return Environments(
        columns=[list(dict.fromkeys(names)) for _, names in chosen],
        differing=differing,
        same=same,
        left_out=len(workers) - sum(len(names) for _, names in chosen),
    )


def flat(worker: WorkerSummary) -> Iterator[tuple[str, str]]:
    """Yield a worker's environment and the settings in force, nested tables as `variables.NAME`."""
    yield "host", worker.host
    yield "driver", worker.driver or "none"
    yield from ((name, text) for name, text in _flat("", worker.environment) if name not in _IDENTITY)
    for name, value in worker.in_force.items():
        asked = worker.asked.get(name, value)
        yield f"in force: {name}", _setting(value) + ("" if asked == value else f" (asked for: {_setting(asked)})")


def _flat(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", _setting(value)


def _setting(value: Any) -> str:
    return "none" if value is None else str(value)


MOST_OPEN = 12
"""Lines of the table before a reader unfolds the rest: half a screen."""

MOST_WORKERS = 64
"""Lines of the table, failed and lost ones first; the others of a fleet are in `report.json`."""

_HELD = (("host", "host_resident_bytes", "host_peak_bytes"), ("device", "device_resident_bytes", "device_peak_bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Memory at the end of a stage and at its peak; shares are of the largest number of its kind."""

    kind: str
    text: str
    resident: float
    peak: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The table of workers, each with its bars by stage; `stages` is empty where memory was not measured by stage.

    All but the first `open` lines are folded; where there are such, faulty workers come first.
    """

    open: int
    stages: tuple[str, ...]
    lines: tuple[tuple[WorkerSummary, list[list[Bar]]], ...]
    left_out: int


def workers(comparison: Comparison) -> Workers:
    """Return the table of workers."""
    named = {name for finding in comparison.findings if finding.severity == "error" for name in finding.workers}
    ranked = sorted(comparison.workers, key=lambda worker: (worker.status == "ok", worker.name not in named))
    chosen = comparison.workers if len(ranked) <= MOST_OPEN else ranked[:MOST_WORKERS]
    stages = tuple(dict.fromkeys(entry.stage for worker in chosen for entry in worker.stage_memory))
    largest = {kind: max(_numbers(chosen, (resident, peak)), default=0) for kind, resident, peak in _HELD}
    return Workers(
        open=MOST_OPEN,
        stages=stages,
        lines=tuple((worker, _held(worker, stages, largest)) for worker in chosen),
        left_out=len(ranked) - len(chosen),
    )


def _held(worker: WorkerSummary, stages: Sequence[str], largest: dict[str, int]) -> list[list[Bar]]:
    by_stage = {entry.stage: entry for entry in worker.stage_memory}
    return [list(_bars(by_stage.get(stage), largest)) for stage in stages]


def _bars(entry: StageMemory | None, largest: dict[str, int]) -> Iterable[Bar]:
    for kind, resident, peak in _HELD if entry is not None else ():
        held, most = getattr(entry, resident), getattr(entry, peak)
        whole = largest[kind]
        if (held is None and most is None) or not whole:
            continue
        parts = ("" if held is None else size(held), "" if most is None else f"peak {size(most)}")
        text = " · ".join(part for part in parts if part)
        yield Bar(kind=kind, text=text, resident=(held or 0) / whole, peak=(most or held or 0) / whole)


def _numbers(chosen: Sequence[WorkerSummary], names: Sequence[str]) -> Iterable[int]:
    numbers = (getattr(entry, name) for worker in chosen for entry in worker.stage_memory for name in names)
    return (number for number in numbers if number is not None and number >= 0)
