"""Counts, maxima and sums of a comparison, of two tensors or of one and its exact value, by NumPy or by the kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts and maxima over two flat real tensors."""

    mismatched: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int | None = 0
    sums: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    """`sums`, `squares`: sum of the differences in each chunk, and of their squares."""
    flipped: dict[int, int] = field(default_factory=dict)
    """Number of elements that differ in a bit, by the bit."""
    first: int | None = None
    last: int | None = None
    """`first`, `last`: numbers of the first and the last element that differ."""
    worst: tuple[float, int] | None = None
    """The largest difference and its element; the first element whose bits differ where all values are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstError:
    """The element of the largest `score`: its ratio, or its error where no tolerance is known."""

    score: float
    index: int
    exact: float

    def comes_before(self, other: WorstError | None) -> bool:
        """Report whether this is the worse element, or the earlier one of two that are as bad."""
        if other is None or is_worse(self.score, other.score):
            return True
        return not is_worse(other.score, self.score) and self.index < other.index


@dataclass(slots=True, kw_only=True)
class ErrorTally:
    """Counts, maxima and sums over a tensor and its exact value; `sums` and `squares` by chunk.

    `ratio` is None as long as no tolerance was given, `max_ulp` once it is not defined; `not_finite` counts exact
    values.
    """

    mismatched: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int | None = 0
    ratio: float | None = None
    magnitude: float = 0.0
    not_finite: int = 0
    sums: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    worst: WorstError | None = None

    def include(self, other: ErrorTally) -> None:
        """Add the tally of other elements of the same tensor."""
        self.mismatched += other.mismatched
        self.max_abs = worse(self.max_abs, other.max_abs)
        self.max_rel = worse(self.max_rel, other.max_rel)
        if self.max_ulp is None or other.max_ulp is None:
            self.max_ulp = None
        else:
            self.max_ulp = max(self.max_ulp, other.max_ulp)
        if other.ratio is not None:
            self.ratio = worse(self.ratio or 0.0, other.ratio)
        self.magnitude = max(self.magnitude, other.magnitude)
        self.not_finite += other.not_finite
        self.sums += other.sums
        self.squares += other.squares
        if other.worst is not None and other.worst.comes_before(self.worst):
            self.worst = other.worst


def total(values: list[float]) -> float:
    """Add sums that are not negative; NaN and infinity propagate."""
    if any(math.isnan(v) for v in values):
        return math.nan
    try:
        return math.inf if math.inf in values else math.fsum(values)
    except OverflowError:  # finite, and too large together
        return math.inf


def worse(a: float, b: float) -> float:
    """Return the larger; NaN is larger than any number."""
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return max(a, b)


def is_worse(a: float, b: float) -> bool:
    """Return whether a is larger than b; NaN is larger than any number."""
    return (math.isnan(a) and not math.isnan(b)) or a > b
