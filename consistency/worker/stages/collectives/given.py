"""What a rank gives: numbers that NumPy draws block by block, so that every rank knows any part of what others give."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 1 << 18
"""Elements that are drawn at a time. What all ranks gave of one block is held at once, and never all that they gave."""

_DRAWN: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "int8": lambda generator, n: generator.integers(-128, 128, n, dtype=np.int8),
    "uint8": lambda generator, n: generator.integers(0, 256, n, dtype=np.uint8),
    # so that the sum of a thousand ranks does not overflow
    "int32": lambda generator, n: generator.integers(-(1 << 20), 1 << 20, n, dtype=np.int32),
    "int64": lambda generator, n: generator.integers(-(1 << 52), 1 << 52, n, dtype=np.int64),
}
"""By dtype, where it is no float: those are normally distributed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one rank gives to one collective: `elements` in all, of the shape (elements,), on the CPU."""

    name: str
    dtype: str
    elements: int
    rank: int

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements from `start` to before `stop`."""
        found = torch.empty(stop - start, dtype=getattr(torch, self.dtype))
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            first = number * BLOCK
            block = self._block(number)[max(0, start - first) : stop - first]
            at = max(start, first) - start
            found[at : at + len(block)] = block
        return found

    def whole(self) -> torch.Tensor:
        return self.part(0, self.elements)

    def _block(self, number: int) -> torch.Tensor:
        seed = zlib.crc32(f"{self.name} {self.dtype} {self.elements} {self.rank} {number}".encode())
        generator = np.random.Generator(np.random.SFC64(seed))
        length = min(BLOCK, self.elements - number * BLOCK)
        if self.dtype in _DRAWN:
            return torch.from_numpy(_DRAWN[self.dtype](generator, length))
        return torch.from_numpy(generator.standard_normal(length, dtype=np.float32))
