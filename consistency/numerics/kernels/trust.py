"""Decide whether this process may use the compiled kernel.

An installation has the kernel if there was a C compiler (`build.py`). Otherwise NumPy computes the same results, bit
for bit except for mean and root mean square, which are sums of floats (`SUMS_APART`). A wrong measure or digest
is a false alarm or a miss. So before a process first uses the kernel for a purpose, it checks it against NumPy on a
small, hard input. If they differ, or if the kernel cannot be loaded, the process stays with NumPy, and
`state` gives the reason.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import torch

from consistency.numerics.chunks import Stretch
from consistency.numerics.dtype import name_of, named
from consistency.numerics.kernels import compiled, numpy_digest
from consistency.numerics.kernels.compiled import BLOCK, CHUNK, DIGEST, KINDS, Kernel, errors_in, load
from consistency.numerics.kernels.compiled_error import CompiledErrors
from consistency.numerics.kernels.hard_inputs import HARD_CHUNK, hard_pairs, hard_stretches, made_up
from consistency.numerics.kernels.numpy_distance import measure_by_numpy
from consistency.numerics.kernels.numpy_error import errors_by_numpy
from consistency.numerics.kernels.tally import ErrorTally, Tally, WorstError, total


@functools.cache
def _refused(purpose: str) -> str | None:
    """Return the reason why the kernel may not be used for a purpose; None if it may."""
    kernel = load()
    return kernel if isinstance(kernel, str) else check(kernel, purpose)


def trusted(purpose: str) -> Kernel | None:
    """Return the kernel if it may be used for one of `PURPOSES`; None means NumPy."""
    kernel = load()
    if isinstance(kernel, Kernel) and _refused(purpose) is None:
        return kernel
    return None


def state() -> str:
    """Return which path this process takes: `compiled: ` and the variant, or `numpy: ` and the reason."""
    kernel = load()
    if isinstance(kernel, str):
        return f"numpy: {kernel}"
    reasons = {purpose: _refused(purpose) for purpose in compiled.PURPOSES}
    refused = [f"{purpose}: {reason}" for purpose, reason in reasons.items() if reason is not None]
    if refused:
        return f"numpy: {'; '.join(refused)}"
    return f"compiled: {compiled.VARIANTS[kernel.variant]}"


def forget() -> None:
    """Clear the results, so that the next use checks again: for tests, which disable and break the kernel."""
    load.cache_clear()
    _refused.cache_clear()


SUMS_APART = 2 * (CHUNK + 2) * 2.0**-53
"""Allowed relative difference between the sums of both paths. A sum of n terms of one sign is off by at most (n - 1) u,
to first order, in any order (Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., section 4.2), with
n <= CHUNK and u = 2**-53; a square and the sum over the chunks add one rounding each, and both paths are off. Twice the
mean is off by no more; the root halves it."""

_OVERFLOWING_BYTES = 257 << 10
"""Bytes of flipped bits that overflow the kernel's small counters: it counts set bits of 16 vectors of 64 bytes at a
time, and keeps at most 255 such counts in a byte."""


def check(kernel: Kernel, purpose: str) -> str | None:
    """Return the first error of the kernel in a purpose, in words; None if it may be trusted."""
    if purpose == DIGEST:
        return _check_digest(kernel)
    if purpose in KINDS:
        return _check_measures(kernel, purpose)
    return _check_errors(kernel, purpose)


def _check_digest(kernel: Kernel) -> str | None:
    """Compare digests of test words with NumPy's, aligned and not."""
    words = numpy_digest.ROW_WORDS
    rows = made_up(np.dtype(np.int64), 7 * words)
    rows[words : 3 * words] = -1  # the largest sums of halves
    # at an odd address, where a tensor of a mapped file may start
    shifted = np.empty(rows.nbytes + 1, np.uint8)[1:]
    shifted[:] = rows.view(np.uint8)
    return digests_differ_in(kernel, rows.view(np.uint8)) or digests_differ_in(kernel, shifted)


def _check_measures(kernel: Kernel, kind: str) -> str | None:
    """Compare measures of two tensors of a dtype with NumPy's, real and complex."""
    dtype = named(kind)
    for name, a, e in hard_pairs(dtype):
        for parts in (1, 2):
            actual = measure_by(kernel, a, e, parts=parts, chunk=2 * BLOCK)  # two chunks
            wrong = differs_in(actual, measure_by_numpy(a, e, parts))
            if wrong is not None:
                return f"wrong {wrong} on {name}"
    return None if _counts_all_bits(kernel, dtype) else "wrong count of flipped bits"


def _check_errors(kernel: Kernel, purpose: str) -> str | None:
    """Compare measures against exact values with NumPy's."""
    dtype = named(next(kind for kind in KINDS if errors_in(kind) == purpose))
    for name, stretch in hard_stretches(dtype):
        wrong = errors_differ_in(*errors_by_both(kernel, stretch))
        if wrong is not None:
            return f"wrong {wrong} on {name}"
    return None


def digests_differ_in(kernel: Kernel, raw: np.ndarray, *, threads: int = 1) -> str | None:
    """Return in words in how many rows of bytes the kernel's sums are not NumPy's; None where all are equal.

    A last row that is not whole is not read.
    """
    rows = len(raw) // numpy_digest.ROW_BYTES
    expected, actual = np.empty(rows, np.int64), np.full(rows, -1)
    numpy_digest.sum_rows(raw[: rows * numpy_digest.ROW_BYTES], expected)
    kernel.digest(raw.ctypes.data, rows, *numpy_digest.weights_of_row(), actual, threads=threads)
    wrong = int((actual != expected).sum())
    return f"wrong digests in {wrong} of {rows} rows" if wrong else None


def errors_by_both(kernel: Kernel, stretch: Stretch) -> tuple[ErrorTally, ErrorTally]:
    """Measure a stretch with a given kernel, in two parts, and with NumPy, by chunks of two blocks."""
    compiled, expected = CompiledErrors(kernel, chunk=HARD_CHUNK), ErrorTally()
    length = len(stretch.value)
    middle = length // 2 // HARD_CHUNK * HARD_CHUNK
    for part in (slice(0, middle), slice(middle, length)):
        compiled.add(cut(stretch, part))
    for start in range(0, length, HARD_CHUNK):
        expected.include(errors_by_numpy(stretch.chunk(start, HARD_CHUNK)))
    return compiled.tally(), expected


def cut(stretch: Stretch, part: slice) -> Stretch:
    """Return a part of a stretch."""
    return replace(
        stretch,
        start=stretch.start + part.start,
        actual=stretch.actual[part],
        value=stretch.value[part],
        base=None if stretch.base is None else stretch.base[part],
        size=None if stretch.size is None else stretch.size[part],
    )


def errors_differ_in(actual: ErrorTally, expected: ErrorTally) -> str | None:
    """Return the first measure in which two paths disagree; None if they agree. Sums may be `SUMS_APART`."""
    for name in ("mismatched", "max_abs", "max_rel", "max_ulp", "ratio", "magnitude", "not_finite"):
        if not _same(getattr(actual, name), getattr(expected, name)):
            return name
    if not _same_worst(actual.worst, expected.worst):
        return "worst"
    return _sums_differ_in(actual, expected)


def _same_worst(x: WorstError | None, y: WorstError | None) -> bool:
    """Report whether two paths found the same worst element."""
    if x is None or y is None:
        return x is y
    return x.index == y.index and _same(x.score, y.score) and _same(x.exact, y.exact)


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


def differs_in(actual: Tally, expected: Tally) -> str | None:
    """Return the first measure in which two paths disagree; None if they agree. Sums may be `SUMS_APART`."""
    for name in ("mismatched", "max_abs", "max_rel", "max_ulp", "flipped", "first", "last"):
        if not _same(getattr(actual, name), getattr(expected, name)):
            return name
    if actual.worst is not None and expected.worst is not None and actual.worst[1:] != expected.worst[1:]:
        return "worst"
    return _sums_differ_in(actual, expected)


def _sums_differ_in(actual: Tally | ErrorTally, expected: Tally | ErrorTally) -> str | None:
    """Return the first sum in which two paths differ by more than `SUMS_APART`."""
    for name in ("sums", "squares"):
        x, y = total(getattr(actual, name)), total(getattr(expected, name))
        if not _same(x, y) and not abs(x - y) <= SUMS_APART * abs(y):
            return name
    return None


def _same(x: object, y: object) -> bool:
    """Report whether two values are equal, or both NaN."""
    return x == y or (x != x and y != y)
