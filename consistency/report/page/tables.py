"""The tables of a run's page beside its map: workers that agree, histograms, environments, memory by stage."""

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
    """Classes of workers that agree bitwise, in some of the tensors of a stage.

    Attributes
    ----------
    stage, load_path : str
        The stage, and its load path.
    tensors : int
        Number of tensors with this partition.
    of : int
        Number of tensors of the stage that have any.
    first : str
        Layer and tensor of the first one with this partition.
    classes : tuple of tuple of str
        Workers of each class, the reference worker's first.
    """

    stage: str
    load_path: str
    tensors: int
    of: int
    first: str
    classes: tuple[tuple[str, ...], ...]


def partitions(tensors: Sequence[TensorComparison]) -> tuple[list[Partition], int]:
    """Return the most common partitions, stage by stage, and how many are left out."""
    by_stage: dict[tuple[str, str], dict[tuple[tuple[str, ...], ...], list[TensorComparison]]] = {}
    for tensor in tensors:
        if tensor.classes:
            by_classes = by_stage.setdefault((tensor.load_path, tensor.stage), {})
            by_classes.setdefault(tensor.classes, []).append(tensor)
    shown: list[Partition] = []
    left_out = 0
    for (load_path, stage), by_classes in by_stage.items():
        total = sum(map(len, by_classes.values()))
        most_common_first = sorted(by_classes.items(), key=lambda item: -len(item[1]))
        left_out += len(most_common_first[MOST_PARTITIONS:])
        for classes, alike in most_common_first[:MOST_PARTITIONS]:
            partition = Partition(
                stage=stage,
                load_path=load_path,
                tensors=len(alike),
                of=total,
                first=f"{alike[0].layer}.{alike[0].tensor}",
                classes=classes,
            )
            shown.append(partition)
    return shown, left_out


_TENTHS = tuple(i / 10 for i in range(1, 11))
_ABOVE = (2.0, 10.0, 100.0, math.inf)  # upper edges of the bins of mismatches

FIELDS: Mapping[str, tuple[int, int]] = {
    "float64": (11, 52),
    "float32": (8, 23),
    "float16": (5, 10),
    "bfloat16": (8, 7),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}
"""Bits of exponent and of fraction; IEEE 754-2019 table 3.5, the bfloat16 of Intel, the OCP's 8-bit formats."""

_WIDEST = 64  # bits of the widest dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Rows whose error/tolerance is in a range; `share` is relative to the fullest bin, for the length of its bar."""

    label: str
    count: int
    share: float
    outside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Error/tolerance of the rows of a stage, as a histogram."""

    stage: str
    rows: int
    tensors: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bit:
    """The number of elements in which one bit of a dtype differed; `share` is relative to the largest number."""

    place: int
    field: str
    count: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """The bits of a dtype, the highest first, over the rows that recorded differing bits."""

    dtype: str
    tensors: int
    rows: int
    bits: tuple[Bit, ...]


def ratios(tensors: Iterable[TensorComparison]) -> list[Ratios]:
    """Count the rows of each stage by error/tolerance, in tenths up to 1."""
    edges = (*_TENTHS, *_ABOVE)
    counts_by_stage: dict[str, list[int]] = {}
    tensors_by_stage: Counter[str] = Counter()
    for tensor in tensors:
        rows_by_ratio: Counter[float] = Counter()
        for outcome in tensor.outcomes:
            if outcome.share is not None:
                rows_by_ratio[outcome.share] += len(outcome.workers)
        if not rows_by_ratio:
            continue
        tensors_by_stage[tensor.stage] += 1
        counts = counts_by_stage.setdefault(tensor.stage, [0] * (len(edges) + 1))  # one more bin for NaN
        for ratio, rows in rows_by_ratio.items():
            counts[_bin_index(float(ratio), edges)] += rows
    return [
        Ratios(stage=stage, rows=sum(counts), tensors=tensors_by_stage[stage], bins=tuple(_bins(counts)))
        for stage, counts in counts_by_stage.items()
    ]


def _bin_index(ratio: float, edges: Sequence[float]) -> int:
    if math.isnan(ratio):
        return len(edges)
    if ratio <= 1:
        return max(0, math.ceil(ratio * 10) - 1)  # the tenths, without a search
    return next(index for index, edge in enumerate(edges) if ratio <= edge)


def _bins(counts: Sequence[int]) -> Iterable[Bin]:
    labels = [f"{edge - 0.1:.1f} – {edge:.1f}" for edge in _TENTHS]
    labels += ["1 – 2", "2 – 10", "10 – 100", "over 100", "NaN"]
    most = max(counts)
    for index, (label, count) in enumerate(zip(labels, counts, strict=True)):
        outside = index >= len(_TENTHS)
        if count or not outside:  # bins above 1 are shown only where they have rows
            yield Bin(label=label, count=count, share=count / most, outside=outside)


def bits(tensors: Iterable[TensorComparison]) -> list[Bits]:
    """Count, by dtype, in how many elements each bit differed, over all rows that recorded it."""
    counts_by_dtype: dict[str, list[int]] = {}
    tensors_by_dtype: Counter[str] = Counter()
    rows_by_dtype: Counter[str] = Counter()
    for tensor in tensors:
        rows = 0
        for outcome in tensor.outcomes:
            flipped_bits = outcome.evidence.get("flipped_bits") if outcome.evidence else None
            if isinstance(flipped_bits, dict) and flipped_bits:
                rows += len(outcome.workers)
                counts = counts_by_dtype.setdefault(tensor.dtype, [0] * _WIDEST)
                _add_flipped_bits(counts, flipped_bits, len(outcome.workers))
        if rows:
            tensors_by_dtype[tensor.dtype] += 1
            rows_by_dtype[tensor.dtype] += rows
    return [
        Bits(dtype=dtype, tensors=tensors_by_dtype[dtype], rows=rows_by_dtype[dtype], bits=tuple(_bits(dtype, counts)))
        for dtype, counts in counts_by_dtype.items()
        if any(counts)
    ]


def _add_flipped_bits(counts: list[int], flipped_bits: Mapping[Any, Any], workers: int) -> None:
    """Add the elements in which each bit differed, on so many workers; entries that make no sense are left out."""
    for place, elements in flipped_bits.items():
        is_bit = str(place).isdecimal() and int(place) < _WIDEST
        is_count = type(elements) is int and elements > 0
        if is_bit and is_count:
            counts[int(place)] += elements * workers


def _bits(dtype: str, counts: Sequence[int]) -> Iterable[Bit]:
    """Yield the bits of a dtype, the highest first; of an unknown dtype, those up to the highest that differed."""
    exponent, fraction = FIELDS.get(dtype, (0, 0))
    width = 1 + exponent + fraction
    if not exponent:
        width = 1 + max(place for place, count in enumerate(counts) if count)
    most = max(counts)
    for place in reversed(range(width)):
        if not exponent:
            field = "bit"
        elif place < fraction:
            field = "fraction"
        elif place < fraction + exponent:
            field = "exponent"
        else:
            field = "sign"
        yield Bit(place=place, field=field, count=counts[place], share=counts[place] / most)


MOST_ENVIRONMENTS = 12
"""Distinct environments side by side: a screen's width."""

_ABSENT = "missing"

_IDENTITY = frozenset({"device_uuid", "variables.CUDA_VISIBLE_DEVICES"})
"""Values that identify a device, so each device would have a column; the table of workers has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Settings line by line; workers with the same environment share a column.

    Attributes
    ----------
    columns : list of list of str
        Names of the workers of each column.
    differing : list of tuple
        Name of a setting and, by column, letter and text; equal values of a line have equal letters.
    same : list of tuple
        Name of a setting and its only value.
    left_out : int
        Number of workers of environments for which there is no column.
    """

    columns: list[list[str]]
    differing: list[tuple[str, list[tuple[str, str]]]]
    same: list[tuple[str, str]]
    left_out: int


def environments(workers: Sequence[WorkerSummary]) -> Environments:
    """Compare the workers' environments, setting by setting."""
    names_by_settings: dict[tuple[tuple[str, str], ...], list[str]] = {}
    # In a fleet, every host would be a column; the table of workers has their names.
    has_hosts = len({worker.host for worker in workers}) <= MOST_ENVIRONMENTS
    for worker in workers:
        settings = tuple((name, text) for name, text in flat(worker) if has_hosts or name != "host")
        names_by_settings.setdefault(settings, []).append(worker.name)
    columns = [(dict(settings), names) for settings, names in names_by_settings.items()][:MOST_ENVIRONMENTS]
    setting_names: dict[str, None] = {}
    for column, _ in columns:
        setting_names |= dict.fromkeys(column)
    differing, same = [], []
    for name in setting_names:
        texts = [column.get(name, _ABSENT) for column, _ in columns]
        letters = {text: letter(number) for number, text in enumerate(dict.fromkeys(texts))}
        if len(letters) > 1:
            differing.append((name, [(letters[text], text) for text in texts]))
        else:
            same.append((name, texts[0]))
    return Environments(
        columns=[list(dict.fromkeys(names)) for _, names in columns],
        differing=differing,
        same=same,
        left_out=len(workers) - sum(len(names) for _, names in columns),
    )


def flat(worker: WorkerSummary) -> Iterator[tuple[str, str]]:
    """Yield a worker's environment and the settings in force, nested tables as `variables.NAME`."""
    yield "host", worker.host
    yield "driver", worker.driver or "none"
    yield from ((name, text) for name, text in _flat("", worker.environment) if name not in _IDENTITY)
    for name, value in worker.in_force.items():
        text = _setting(value)
        asked = worker.asked.get(name, value)
        if asked != value:
            text += f" (asked for: {_setting(asked)})"
        yield f"in force: {name}", text


def _flat(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", _setting(value)


def _setting(value: Any) -> str:
    return "none" if value is None else str(value)


MOST_OPEN = 12
"""Lines of the table of workers before a reader unfolds the others: half a screen."""

MOST_WORKERS = 64
"""Lines of the table of workers, failed and lost ones first; `report.json` has the others of a fleet."""

_MEMORY_FIELDS = (
    ("host", "host_resident_bytes", "host_peak_bytes"),
    ("device", "device_resident_bytes", "device_peak_bytes"),
)
"""Kind of memory, and the fields of `StageMemory` with the bytes at the end of a stage and at its peak."""


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
    with_errors: set[str] = set()
    for finding in comparison.findings:
        if finding.severity == "error":
            with_errors.update(finding.workers)
    chosen: Sequence[WorkerSummary] = comparison.workers
    if len(chosen) > MOST_OPEN:  # fewer are all visible, in their own order
        ranked = sorted(chosen, key=lambda worker: (worker.status == "ok", worker.name not in with_errors))
        chosen = ranked[:MOST_WORKERS]
    stages = tuple(dict.fromkeys(entry.stage for worker in chosen for entry in worker.stage_memory))
    largest = {kind: max(_byte_counts(chosen, (resident, peak)), default=0) for kind, resident, peak in _MEMORY_FIELDS}
    return Workers(
        open=MOST_OPEN,
        stages=stages,
        lines=tuple((worker, _memory_bars(worker, stages, largest)) for worker in chosen),
        left_out=len(comparison.workers) - len(chosen),
    )


def _memory_bars(worker: WorkerSummary, stages: Sequence[str], largest: Mapping[str, int]) -> list[list[Bar]]:
    """Return the bars of a worker, by stage."""
    by_stage = {entry.stage: entry for entry in worker.stage_memory}
    return [list(_stage_bars(by_stage.get(stage), largest)) for stage in stages]


def _stage_bars(entry: StageMemory | None, largest: Mapping[str, int]) -> Iterable[Bar]:
    """Yield a bar per kind of memory that was measured; `largest` has the bytes of a full bar."""
    if entry is None:
        return
    for kind, resident_field, peak_field in _MEMORY_FIELDS:
        resident, peak = getattr(entry, resident_field), getattr(entry, peak_field)
        full = largest[kind]
        if (resident is None and peak is None) or not full:
            continue
        texts = []
        if resident is not None:
            texts.append(size(resident))
        if peak is not None:
            texts.append(f"peak {size(peak)}")
        yield Bar(
            kind=kind,
            text=" · ".join(text for text in texts if text),
            resident=(resident or 0) / full,
            peak=(peak or resident or 0) / full,
        )


def _byte_counts(workers: Sequence[WorkerSummary], fields: Sequence[str]) -> Iterable[int]:
    """Yield the bytes in these fields of all workers' stages; a stranger's capture may have negative ones."""
    for worker in workers:
        for entry in worker.stage_memory:
            for name in fields:
                count = getattr(entry, name)
                if count is not None and count >= 0:
                    yield count
