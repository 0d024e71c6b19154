"""The digest of bytes by the formula in `consistency.numerics.digest`, in Python's integers."""

from __future__ import annotations

import functools
import math

import numpy as np

from consistency.numerics.kernels.numpy_digest import BLOCK_BYTES, ROW_BYTES

WORDS, ROWS = ROW_BYTES // 8, BLOCK_BYTES // ROW_BYTES


@functools.cache
def weights() -> tuple[list[int], list[int]]:
    """Draw the weights w and v of the docstring's formula, by way of the generator's raw stream."""
    count = WORDS + ROWS
    raw = [int(x) for x in np.random.PCG64(0x636F6E7369737465).random_raw(2 * count)]
    w = [(x - 2**63) % 2**64 for x in raw[:count]]  # an integer of the full range is the raw word, moved by its low end
    difference = [(x - 2**63) % 2**64 for x in raw[count:]]
    return w, [(d + (wi << 32)) % 2**64 for wi, d in zip(w, difference, strict=True)]


def hash_words(data: bytes, first: int) -> int:
    """Compute the docstring's formula in integers of any size, with the weights from `first` on."""
    w, v = weights()
    total = 0
    for i in range(math.ceil(len(data) / 8)):
        even = int.from_bytes(data[8 * i : 8 * i + 4].ljust(4, b"\0"), "little", signed=False)
        odd = int.from_bytes(data[8 * i + 4 : 8 * i + 8].ljust(4, b"\0"), "little", signed=True)
        total += w[first + i] * even + v[first + i] * odd
    return total % 2**64


def by_definition(data: bytes) -> tuple[int, ...]:
    """Hash the rows of each block, and then the digests of its rows."""
    rows = [hash_words(data[i : i + ROW_BYTES], 0).to_bytes(8, "little") for i in range(0, len(data), ROW_BYTES)]
    return tuple(hash_words(b"".join(rows[i : i + ROWS]), WORDS) for i in range(0, len(rows), ROWS))
