"""The digests of rows and blocks with NumPy, by the formula in `consistency.numerics.digest`."""

from __future__ import annotations

import functools
import threading

import numpy as np

BLOCK_BYTES = 256 * 1024
"""Bytes per block, the unit in which a digest locates differences."""

ROW_BYTES = 8 * 1024
"""Bytes per row: the two weight tables of 8 KiB each and what streams past them fit in a level-1 cache of 32 KiB."""

ROW_WORDS = ROW_BYTES // 8
_ROWS = BLOCK_BYTES // ROW_BYTES
_WEIGHT_SEED = 0x636F6E7369737465  # "consiste"; NumPy promises PCG64's stream across versions and platforms
_CHUNK_ROWS = 64
"""Rows that are digested at once, 512 KiB: they and their shifted copy stay in a level-2 cache of 1 MiB, and a call's
overhead is small."""


def sum_rows(raw: np.ndarray, out: np.ndarray) -> None:
    """Digest whole rows into the first elements of an int64 array."""
    rows = raw.view("<i8").reshape(-1, ROW_WORDS)  # NumPy reads unaligned words too
    w, v = weights_of_row()
    scratch = _scratch()
    high = np.empty(_CHUNK_ROWS, np.int64)
    for start in range(0, len(rows), _CHUNK_ROWS):
        x = rows[start : start + _CHUNK_ROWS]
        shifted, low = scratch[: len(x)], out[start : start + len(x)]
        np.einsum("ri,i->r", x, w, out=low)
        np.right_shift(x, 32, out=shifted)
        low += np.einsum("ri,i->r", shifted, v, out=high[: len(x)])


def sum_short_row(raw: np.ndarray) -> np.ndarray:
    """Return the digest, `(1,)` int64, of the bytes that do not fill a row."""
    padded = np.zeros(ROW_BYTES, np.uint8)
    padded[: len(raw)] = raw
    return _summed(padded.view("<i8")[None], weights_of_row())


def fold(rows: np.ndarray) -> np.ndarray:
    """Fold the digests of rows, `(n,)` int64, into those of blocks."""
    padded = np.zeros(-(-len(rows) // _ROWS) * _ROWS, np.int64)
    padded[: len(rows)] = rows
    return _summed(padded.reshape(-1, _ROWS), _weights_of_block())


def _summed(x: np.ndarray, weights: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Return the weighted sum of each row of words, `(rows,)` int64."""
    w, v = weights
    sums: np.ndarray = np.einsum("ri,i->r", x, w) + np.einsum("ri,i->r", x >> 32, v)
    return sums


_buffers = threading.local()


def _scratch() -> np.ndarray:
    """Return this thread's buffer, `(_CHUNK_ROWS, ROW_WORDS)`: a new one would cost a page fault per page."""
    if not hasattr(_buffers, "scratch"):
        _buffers.scratch = np.empty((_CHUNK_ROWS, ROW_WORDS), np.int64)
    scratch: np.ndarray = _buffers.scratch
    return scratch


@functools.cache
def _weights() -> np.ndarray:
    """Return the fixed weights, `(2, ROW_WORDS + _ROWS)` int64: `w` for even words, `v - 2**32 w` for shifted words."""
    stream = np.random.Generator(np.random.PCG64(_WEIGHT_SEED))
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    # v - 2**32 w is as uniform as v, so it is drawn directly
    return stream.integers(low, high, size=(2, ROW_WORDS + _ROWS), dtype=np.int64, endpoint=True)


@functools.cache
def weights_of_row() -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of a row's words, `(ROW_WORDS,)` int64 each: `w`, and `v - 2**32 w`."""
    w, v = _weights()[:, :ROW_WORDS].copy()
    return w, v


@functools.cache
def _weights_of_block() -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of a block's rows, `(_ROWS,)` int64 each: `w`, and `v - 2**32 w`."""
    w, v = _weights()[:, ROW_WORDS:].copy()
    return w, v
