"""Distances between floats in units in the last place, computed in integers of their own width."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Steps:
    """Distances between the floats of two chunks in units in the last place.

    Bits of floats of one sign are ordered by magnitude, so their difference is the distance. The distance of two floats
    of opposite sign is the sum of their distances from zero. NaN has no place in the order.
    """

    x: np.ndarray
    y: np.ndarray
    apart: np.ndarray
    """`x`, `y`, `apart`: bits of both as signed integers, and their difference."""
    across: np.ndarray | None
    """Where the signs differ, if anywhere; `apart` is 0 there."""
    largest: int

    @classmethod
    def between(cls, x: np.ndarray, y: np.ndarray, flips: np.ndarray) -> Steps:
        """Return the distances of two chunks, given by the bits of both and their exclusive or."""
        signed = np.dtype(f"i{x.itemsize}")
        x, y, flips = x.view(signed), y.view(signed), flips.view(signed)
        apart = np.subtract(x, y)
        across = None
        # where the signs differ the highest bit flips, which is the sign of a signed integer
        if int(np.minimum.reduce(flips)) < 0:
            across = flips < 0
            apart[across] = 0
        return cls(x, y, apart, across, _largest(x, y, apart, across))

    def without(self, left_out: np.ndarray) -> int:
        """Return the largest distance without the elements of a mask."""
        across = None if self.across is None else self.across & ~left_out
        return _largest(self.x, self.y, np.where(left_out, 0, self.apart), across)


def _largest(x: np.ndarray, y: np.ndarray, apart: np.ndarray, across: np.ndarray | None) -> int:
    """Return the largest distance; the arrays are those of `Steps`."""
    largest = max(int(np.maximum.reduce(apart)), -int(np.minimum.reduce(apart)))
    if across is None or not bool(across.any()):
        return largest
    # as unsigned integers, in which the sum of two magnitudes does not overflow
    magnitude = 2 ** (8 * x.itemsize - 1) - 1
    sizes = (x[across] & magnitude).astype(np.uint64) + (y[across] & magnitude).astype(np.uint64)
    return max(largest, int(sizes.max()))


def farthest(x: np.ndarray, y: np.ndarray) -> int:
    """Return the largest distance between bits as signed integers that wrap."""
    apart = np.subtract(x.view(f"i{x.itemsize}"), y.view(f"i{y.itemsize}"))
    return max(int(np.maximum.reduce(apart)), -int(np.minimum.reduce(apart)))
