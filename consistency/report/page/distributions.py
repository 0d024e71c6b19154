"""Histograms: error/tolerance by stage, and differing bits by dtype."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from consistency.comparison.result import TensorComparison

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
