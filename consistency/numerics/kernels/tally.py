"""What was seen of two tensors' bits and numbers, by whichever path."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Seen:
    """What was seen of two flat real tensors so far.

    Attributes
    ----------
    mismatched : int
    max_abs, max_rel : float
    max_ulp : int or None
    sums, squares : list of float
        Of the differences, by chunk.
    flipped : dict of int to int
        By bit, in how many elements it differs.
    first, last : int or None
        Elements that differ.
    worst : tuple of (float, int) or None
        The largest difference and its element, or the first that differs where no number does.
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
