"""Check the compiled kernel against NumPy on a small input that covers the hard cases."""

from __future__ import annotations

import math

import numpy as np
import torch

from consistency.numerics.dtype import bit_patterns, name_of, named
from consistency.numerics.kernels import numpy_digest
from consistency.numerics.kernels.compiled import BLOCK, CHUNK, DIGEST, Kernel
from consistency.numerics.kernels.numpy_distance import measure_by_numpy
from consistency.numerics.kernels.tally import Tally, total

SUMS_APART = 2 * (CHUNK + 2) * 2.0**-53
"""Allowed relative difference between the sums of both paths. A sum of n terms of one sign is off by at most (n - 1) u,
to first order, in any order (Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., section 4.2), with
n <= CHUNK and u = 2**-53; a square and the sum over the chunks add one rounding each, and both paths are off. Twice the
mean is off by no more; the root halves it."""

_ELEMENTS = 3 * BLOCK + 78  # whole blocks and a partial one; even, for complex numbers

_OVERFLOWING_BYTES = 257 << 10
"""The kernel counts set bits of 16 vectors of 64 bytes at a time, and keeps at most 255 such counts in a byte."""


def check(kernel: Kernel, purpose: str) -> str | None:
    """Return what the kernel gets wrong for a purpose; None if it may be trusted."""
    return _check_digest(kernel) if purpose == DIGEST else _check_measures(kernel, purpose)


def _check_digest(kernel: Kernel) -> str | None:
    words = numpy_digest.ROW_WORDS
    rows = made_up(np.dtype(np.int64), 7 * words)
    rows[words : 3 * words] = -1  # the largest sums of halves
    # at an odd address, where a tensor of a mapped file may start
    shifted = np.empty(rows.nbytes + 1, np.uint8)[1:]
    shifted[:] = rows.view(np.uint8)
    expected, actual = np.empty((2, 7), np.int64)
    numpy_digest.sum_rows(rows.view(np.uint8), expected)
    for raw in (rows.view(np.uint8), shifted):
        kernel.digest(raw.ctypes.data, 7, *numpy_digest.weights_of_row(), actual)
        if not np.array_equal(actual, expected):
            return f"wrong digests in {int((actual != expected).sum())} of 7 test rows"
    return None


def _check_measures(kernel: Kernel, kind: str) -> str | None:
    dtype = named(kind)
    for name, a, e in hard_pairs(dtype):
        for parts in (1, 2):
            actual = measure_by(kernel, a, e, parts=parts, chunk=2 * BLOCK)  # two chunks
            wrong = differs_in(actual, measure_by_numpy(a, e, parts))
            if wrong is not None:
                return f"wrong {wrong} on {name}"
    return None if _counts_all_bits(kernel, dtype) else "wrong count of flipped bits"


def measure_by(
    kernel: Kernel, a: torch.Tensor, e: torch.Tensor, *, parts: int = 1, threads: int = 1, chunk: int = CHUNK
) -> Tally:
    """Measure flat, contiguous tensors of a dtype of `KINDS` with a given kernel."""
    return kernel.measure(
        name_of(a.dtype), a.data_ptr(), e.data_ptr(), a.numel(), parts=parts, threads=threads, chunk=chunk
    )


def _counts_all_bits(kernel: Kernel, dtype: torch.dtype) -> bool:
    """Check the count of flipped bits on more words than a byte can count."""
    zeros = torch.zeros(_OVERFLOWING_BYTES // dtype.itemsize, dtype=dtype)
    ones = torch.full((_OVERFLOWING_BYTES,), 255, dtype=torch.uint8).view(dtype)
    return measure_by(kernel, ones, zeros).flipped == dict.fromkeys(range(8 * dtype.itemsize), zeros.numel())


def hard_pairs(dtype: torch.dtype) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return pairs of tensors: close values, values of any size, and arbitrary bits.

    NaN on one side spoils every largest difference, so only the last pair has it. The close values differ away from
    zero, so that it matters which of the two a difference is divided by.
    """
    bits = np.dtype(f"i{dtype.itemsize}")
    stream = np.random.Generator(np.random.PCG64(1))
    numbers = torch.from_numpy(stream.standard_normal(_ELEMENTS)).to(dtype)
    steps = stream.integers(0, 4, numbers.numel()).astype(bits)
    steps[BLOCK : 2 * BLOCK] = 0  # a block that is equal
    close = (bit_patterns(numbers).numpy() + steps).view(bits)
    x, y = _pairs_of_extremes(dtype), made_up(bits, _ELEMENTS)
    anything = [torch.from_numpy(side).view(dtype) for side in (np.concatenate([x[0], y]), np.concatenate([x[1], -y]))]
    finite = [torch.where(torch.isfinite(side), side, 0) for side in anything]
    both_nan = torch.isnan(anything[0]) & torch.isnan(anything[1])
    paired = [torch.where(both_nan, side, number) for side, number in zip(anything, finite, strict=True)]
    numeric = [torch.where(torch.isnan(side), 1, side) for side in anything]
    return [
        ("close values", torch.from_numpy(close).view(dtype), numbers),
        ("finite values", finite[0], finite[1]),
        ("paired NaNs", paired[0], paired[1]),
        ("values and infinities", numeric[0], numeric[1]),
        ("arbitrary bits", anything[0], anything[1]),
    ]


def _pairs_of_extremes(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Pair zeros, subnormals, neighbouring numbers, the largest, infinities and NaNs, each with each."""
    info = torch.finfo(dtype)
    numbers = (0.0, info.tiny / 2, info.tiny, 1.0, 1.0 + info.eps, 2.0, info.max, math.inf, math.nan)
    ones = bit_patterns(torch.tensor(numbers, dtype=torch.float64).to(dtype)).numpy()
    extremes = np.concatenate([ones, ones + np.ones(1, ones.dtype)])  # the next one: NaN gets another payload
    extremes = np.concatenate([extremes, extremes | np.iinfo(ones.dtype).min])
    return np.repeat(extremes, len(extremes)), np.tile(extremes, len(extremes))


def made_up(dtype: np.dtype, count: int) -> np.ndarray:
    """Return integers of the full range, in which every bit is set and clear, including the extreme ones."""
    bounds = np.iinfo(dtype)
    stream = np.random.Generator(np.random.PCG64(0))  # torch's generators are the model's, and are left alone
    words = stream.integers(bounds.min, bounds.max, size=count, dtype=dtype.type, endpoint=True)
    words[:5] = (bounds.min, bounds.max, 0, -1, 1)
    return np.asarray(words)


def differs_in(actual: Tally, expected: Tally) -> str | None:
    """Return the first measure in which two paths disagree; None if they agree. Sums may be `SUMS_APART`."""
    for name in ("mismatched", "max_abs", "max_rel", "max_ulp", "flipped", "first", "last"):
        if not _same(getattr(actual, name), getattr(expected, name)):
            return name
    if actual.worst is not None and expected.worst is not None and actual.worst[1:] != expected.worst[1:]:
        return "worst"
    for name in ("sums", "squares"):
        x, y = total(getattr(actual, name)), total(getattr(expected, name))
        if not _same(x, y) and not abs(x - y) <= SUMS_APART * abs(y):
            return name
    return None


def _same(x: object, y: object) -> bool:
    return x == y or (x != x and y != y)
