"""How far a computed tensor is from an exact (float64) reference, in one pass over chunks that stay in cache."""

from __future__ import annotations

import math

import torch

from consistency.numbers import Real
from consistency.numerics.distance import Measure, hexadecimal, is_worse, unravel, worse
from consistency.numerics.dtype import bit_patterns, ordered_integers

CHUNK = 1 << 14
"""Elements per chunk: a handful of float64 temporaries of 128 KiB fit in a level-2 cache of 1 MiB."""


class ErrorTally:
    """Accumulate a `Measure` against an exact reference, chunk by chunk.

    Parameters
    ----------
    shape : tuple of int
    dtype : torch.dtype
        Of the tested tensor.
    """

    def __init__(self, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype
        self._mismatched = 0
        self._max_abs = self._max_rel = self._sum = self._squares = self._magnitude = 0.0
        self._max_ulp: int | None = 0
        self._ratio: float | None = None
        self._worst: tuple[float, int, float, float, str, str] | None = None

    def add(self, actual: torch.Tensor, exact: torch.Tensor, *, allowed: torch.Tensor | None, start: int) -> None:
        """Add a chunk.

        Parameters
        ----------
        actual : torch.Tensor
            Flat, of the tested dtype.
        exact : torch.Tensor
            Flat float64.
        allowed : torch.Tensor or None
            Flat float64, what each element may be off, above zero.
        start : int
            Flat index of the chunk's first element.
        """
        if not actual.numel():
            return
        rounded = exact.to(self._dtype)
        size = exact.abs()
        self._see_magnitude(size)
        difference = _difference(actual, exact)
        # what rounds to the same bits is as right as this dtype can be, where it overflows to infinity too
        same = bit_patterns(actual) == bit_patterns(rounded)
        right = int(torch.count_nonzero(same))
        largest = float(difference.max())
        if right and not math.isfinite(largest):
            difference.masked_fill_(same & ~torch.isfinite(difference), 0.0)
            largest = float(difference.max())
        self._mismatched += actual.numel() - right
        badness = difference
        if allowed is not None:
            badness = difference / allowed
            badness.masked_fill_(difference == 0, 0.0)  # 0 / 0 where nothing is allowed and nothing is off
            self._ratio = worse(self._ratio or 0.0, float(badness.max()))
        self._max_abs = worse(self._max_abs, largest)
        self._sum += float(difference.sum())
        self._squares += float(torch.dot(difference, difference))
        relative = difference / size
        relative.masked_fill_(difference == 0, 0.0)
        if not math.isfinite(largest):
            relative.masked_fill_(torch.isinf(difference), math.inf)  # not NaN where the reference is infinite too
        self._max_rel = worse(self._max_rel, float(relative.max()))
        if right < actual.numel():
            self._see_ulp(actual, rounded, difference)
        i = int(torch.argmax(badness))  # NaN counts as the largest
        score = float(badness[i])
        # an exact result has no worst element
        if score != 0 and (self._worst is None or is_worse(score, self._worst[0])):
            bits = hexadecimal(actual[i]), hexadecimal(rounded[i])
            self._worst = (score, start + i, float(actual[i]), float(exact[i]), *bits)

    def result(self) -> Measure:
        n = max(1, math.prod(self._shape))
        worst = self._worst
        return Measure(
            elements=math.prod(self._shape),
            mismatched=self._mismatched,
            max_abs=Real(self._max_abs),
            mean_abs=Real(self._sum / n),
            rms=Real(math.sqrt(self._squares / n) if not math.isnan(self._squares) else math.nan),
            max_rel=Real(self._max_rel),
            max_ulp=self._max_ulp,
            bound_ratio=None if self._ratio is None else Real(self._ratio),
            worst_index=None if worst is None else unravel(worst[1], self._shape),
            worst_actual=None if worst is None else Real(worst[2]),
            worst_expected=None if worst is None else Real(worst[3]),
            worst_actual_bits=None if worst is None else worst[4],
            worst_expected_bits=None if worst is None else worst[5],
            magnitude=Real(self._magnitude),
        )

    def _see_magnitude(self, size: torch.Tensor) -> None:
        largest = float(size.max())
        if not math.isfinite(largest):
            largest = float(size.masked_fill(~torch.isfinite(size), 0.0).max())
        self._magnitude = max(self._magnitude, largest)

    def _see_ulp(self, actual: torch.Tensor, rounded: torch.Tensor, difference: torch.Tensor) -> None:
        if self._max_ulp is None or not actual.dtype.is_floating_point or bool(torch.isnan(difference).any()):
            self._max_ulp = None
            return
        x, y = ordered_integers(actual), ordered_integers(rounded)
        both_nan = torch.isnan(actual) & torch.isnan(rounded)
        # two float64 of opposite sign can be further apart than int64 reaches: the difference wraps and is read as
        # unsigned, in whose order a value comes where its sign-flipped bits come in the signed one
        apart = (torch.maximum(x, y) - torch.minimum(x, y)).masked_fill_(both_nan, 0)
        step = int(torch.bitwise_xor(apart, -(1 << 63)).max()) + (1 << 63)
        self._max_ulp = max(self._max_ulp, step)


def _difference(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return |actual - exact|; 0 for equal infinities and for paired NaNs, NaN where one side alone is NaN."""
    a = actual.to(torch.float64)
    difference = (a - exact).abs_()
    if not math.isfinite(float(difference.sum())):
        difference.masked_fill_((a == exact) | (torch.isnan(a) & torch.isnan(exact)), 0.0)
    return difference
