"""What a comparison of two tensors has counted so far, by NumPy or by the compiled kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts and maxima over two flat real tensors.

    Attributes
    ----------
    sums, squares : list of float
        Of the differences, by chunk.
    flipped : dict of int to int
        By bit, the number of elements that differ in it.
    first, last : int or None
        Elements that differ.
    worst : tuple of (float, int) or None
        The largest difference and its element; the first element whose bits differ where all values are equal.
    """

    mismatched: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int | None = 0
    sums: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    flipped: dict[int, int] = field(default_factory=dict)
    first: int | None = None
    last: int | None = None
    worst: tuple[float, int] | None = None


def total(values: list[float]) -> float:
    """Add sums that are not negative; NaN and infinity propagate."""
    if any(math.isnan(v) for v in values):
        return math.nan
    return math.inf if math.inf in values else math.fsum(values)


def worse(a: float, b: float) -> float:
    """Return the larger; NaN is larger than any number."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def is_worse(a: float, b: float) -> bool:
    """Return whether a is larger than b; NaN is larger than any number."""
    return (math.isnan(a) and not math.isnan(b)) or a > b
