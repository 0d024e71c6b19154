"""Count NaN and infinities in the bytes of a tensor: all bits of their exponent are set. Without torch."""

from __future__ import annotations

import numpy as np

_FIRST = {
    "float64": (np.uint64, 0x7FF << 52), "float32": (np.uint32, 0xFF << 23), "bfloat16": (np.uint16, 0xFF << 7),
    "float16": (np.uint16, 0x1F << 10), "complex64": (np.uint32, 0xFF << 23), "complex128": (np.uint64, 0x7FF << 52),
    "float8_e5m2": (np.uint8, 0x1F << 2), "float8_e4m3fn": (np.uint8, 0x7F),
}  # fmt: skip
"""By dtype the integers of its size (of its parts), and the first bits, without the sign, of what is not finite."""


def count_in_bits(raw: np.ndarray, dtype: str) -> int:
    """Return how many elements are NaN or infinite, given as bytes; 0 for a dtype that has neither or is unknown.

    Each part of a complex number counts. Where all are finite, nothing is allocated.
    """
    if dtype not in _FIRST or not raw.size:
        return 0
    unsigned, first = _FIRST[dtype]
    bits = raw.view(unsigned)
    sign = 1 << (8 * bits.itemsize - 1)
    positive = bits.view(np.dtype(f"i{bits.itemsize}"))  # negative numbers are below all of them
    if int(positive.max()) < first and int(bits.max()) < sign + first:
        return 0
    return int(np.count_nonzero((bits & (sign - 1)) >= first))
