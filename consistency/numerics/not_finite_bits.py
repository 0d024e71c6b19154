"""Count NaN and infinities in the bytes of a tensor: all bits of their exponent are set. Without torch."""

from __future__ import annotations

import numpy as np

_SMALLEST_BITS = {
    "float64": (np.uint64, 0x7FF << 52), "float32": (np.uint32, 0xFF << 23), "bfloat16": (np.uint16, 0xFF << 7),
    "float16": (np.uint16, 0x1F << 10), "complex64": (np.uint32, 0xFF << 23), "complex128": (np.uint64, 0x7FF << 52),
    "float8_e5m2": (np.uint8, 0x1F << 2), "float8_e4m3fn": (np.uint8, 0x7F),
}  # fmt: skip
"""For each dtype, the unsigned integers of its size (of the size of its parts if it is complex), and the smallest bits,
without the sign, of a number that is not finite."""


def count_in_bits(raw: np.ndarray, dtype: str) -> int:
    """Return how many elements are NaN or infinite, given as bytes; 0 for a dtype that has neither or is unknown.

    Each part of a complex number counts. Where all are finite, nothing is allocated.
    """
    if dtype not in _SMALLEST_BITS or not raw.size:
        return 0
    unsigned, smallest = _SMALLEST_BITS[dtype]
    bits = raw.view(unsigned)
    sign = 1 << (8 * bits.itemsize - 1)
    positive = bits.view(np.dtype(f"i{bits.itemsize}"))  # as signed integers, negative numbers are below all others
    if int(positive.max()) < smallest and int(bits.max()) < sign + smallest:
        return 0
    return int(np.count_nonzero((bits & (sign - 1)) >= smallest))
