"""Random factors from which `RoundingNoise` takes its errors."""

from __future__ import annotations

import functools

import numpy as np
import torch

from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.rounding_operations import RoundingKind

LENGTH = 1 << 17
"""Elements of a tensor that take noise from the pool at once; the pool is twice as long, and each operation begins at
another place of it: a draw from a generator for each element takes longer than the operations of a small model."""

KEPT_SEEDS = 2
"""Seeds whose pools are kept for the next passes with them: those that each stage begins with. Of a small model all
pools take a sixth of a pass to compute, and 18 MB."""

STRIDE = 40_503
"""Steps of the beginnings in the pool: prime to its length, and near the golden ratio of 2¹⁶, so that they spread."""

_MOVED = {False: 11, True: 43}
"""Number of elements of 256 that are moved up, and as many down; True is for library functions. The variance is
22/256 · (2u)² = 0.34 u², for functions four times that."""

_MOVED_HALF = 1
"""Number of elements of 256 that are moved up in a half type, and as many down: a probability of 1/128 together."""


class Pools:
    """Pools of random factors of one seed, each of `2 * LENGTH` elements; a pool is made when it is first needed."""

    def __init__(self, seed: int) -> None:
        generator = np.random.Generator(np.random.PCG64(seed))
        self.deviates = torch.from_numpy(generator.standard_normal(2 * LENGTH, dtype=np.float32))
        self._bytes = torch.from_numpy(generator.integers(0, 256, 2 * LENGTH, dtype=np.uint8))
        self._pools: dict[tuple[torch.dtype, float], torch.Tensor] = {}

    def normal(self, units: float) -> torch.Tensor:
        """Return factors that differ from 1 by a normal deviate of so many unit roundoffs of float32."""
        key = torch.float32, units
        if key not in self._pools:
            self._pools[key] = 1 + self.deviates * (units * UNIT_ROUNDOFF[torch.float32])
        return self._pools[key]

    def moving(self, dtype: torch.dtype, kind: RoundingKind) -> torch.Tensor:
        """Return factors that leave most elements and move the others to a neighbour."""
        moved = _MOVED_HALF if dtype != torch.float32 else _MOVED[kind is RoundingKind.FUNCTION]
        key = dtype, -moved  # negative, so that no number of units in `normal` is the same key
        if key not in self._pools:
            sign = (self._bytes < moved).to(torch.float32) - (self._bytes >= 256 - moved).to(torch.float32)
            self._pools[key] = (1 + 2 * UNIT_ROUNDOFF[dtype] * sign).to(dtype)
        return self._pools[key]


kept_pools = functools.cache(Pools)
"""Return the pools of a seed, and keep them for the next pass with it."""
