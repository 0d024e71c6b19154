"""Measure how far a computed tensor is from an exact (float64) reference, with NumPy, chunk by chunk.

NumPy's reductions are vectorised, and it writes into buffers that are reused. Infinities and NaN are handled only if a
reduction shows that there are any. The compiled kernel is checked against this path, and leaves such chunks to it.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import torch

from consistency.numerics.chunks import CHUNK, Chunk
from consistency.numerics.dtype import bit_patterns
from consistency.numerics.kernels.numpy_distance import numbers_of, square_sum
from consistency.numerics.kernels.tally import ErrorTally, WorstError
from consistency.numerics.steps import Steps


def errors_by_numpy(chunk: Chunk) -> ErrorTally:
    """Measure a chunk of a tensor of floats; its arrays are left as they are."""
    if not chunk.actual.numel():
        return ErrorTally()
    with np.errstate(all="ignore"):  # values that are not finite are settled below
        return _errors(chunk.actual, chunk.exact, chunk.allowed, chunk.start)


def _errors(actual: torch.Tensor, exact: np.ndarray, allowed: np.ndarray | None, start: int) -> ErrorTally:
    """Measure a chunk whose first element has the number `start`."""
    difference, quotient, size, narrow = _buffers(len(exact))
    rounded = _rounded(exact, actual.dtype, narrow)
    x, y = bit_patterns(actual).numpy(), bit_patterns(rounded).numpy()
    numbers = numbers_of(actual)
    np.subtract(numbers, exact, out=difference)
    np.abs(difference, out=difference)
    total = float(np.add.reduce(difference))
    both_nan = None
    if not math.isfinite(total):
        both_nan = np.isnan(numbers) & np.isnan(exact)
        difference[(numbers == exact) | both_nan] = 0.0
        # a value that rounds to the same bits is as correct as this dtype allows, even if it overflows to infinity
        difference[(x == y) & ~np.isfinite(difference)] = 0.0
        total = float(np.add.reduce(difference))
    largest = float(np.maximum.reduce(difference))  # NaN counts as the largest, here and below
    tally = ErrorTally(max_abs=largest, sums=[total], squares=[square_sum(difference)])
    scores = difference
    if allowed is not None:
        scores = _divided(difference, allowed, quotient)
        tally.ratio = float(np.maximum.reduce(scores))
    score = float(np.maximum.reduce(scores))
    if math.isnan(score) or score > 0:  # an exact result has no worst element
        i = int(np.argmax(scores))
        tally.worst = WorstError(score=score, index=start + i, exact=float(exact[i]))
    np.abs(exact, out=size)
    tally.magnitude = float(np.maximum.reduce(size))
    if not math.isfinite(tally.magnitude):
        finite = np.isfinite(size)
        tally.magnitude = float(np.max(size, where=finite, initial=0.0))
        tally.not_finite = len(size) - int(np.count_nonzero(finite))
    # in the buffer of the scores, which have told the worst element
    relative = _divided(difference, size, quotient)
    if not math.isfinite(largest):
        relative[np.isinf(difference)] = math.inf  # not NaN where the reference is infinite too
    tally.max_rel = float(np.maximum.reduce(relative))
    tally.mismatched = int(np.count_nonzero(np.not_equal(x, y)))
    if tally.mismatched:
        tally.max_ulp = _ulp(actual.dtype, x, y, largest, both_nan)
    return tally


def _ulp(dtype: torch.dtype, x: np.ndarray, y: np.ndarray, largest: float, both_nan: np.ndarray | None) -> int | None:
    """Return the largest distance in units in the last place; None where it is not defined."""
    if not dtype.is_floating_point or math.isnan(largest):
        return None
    steps = Steps.between(x, y, np.bitwise_xor(x, y))
    return steps.largest if both_nan is None else steps.without(both_nan)


def _divided(difference: np.ndarray, by: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Divide into `out`; 0 / 0 is 0: no error."""
    np.divide(difference, by, out=out)
    if math.isnan(float(np.maximum.reduce(out))):
        out[difference == 0] = 0.0
    return out


def _rounded(exact: np.ndarray, dtype: torch.dtype, narrow: np.ndarray) -> torch.Tensor:
    """Round to the tested dtype; NumPy has no bfloat16 and is slow with float16."""
    if dtype == torch.float32:
        np.copyto(narrow, exact, casting="same_kind")
        return torch.from_numpy(narrow)
    return torch.from_numpy(exact).to(dtype)


_thread_buffers = threading.local()


def _buffers(length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return three float64 buffers and a float32 buffer of this thread: new ones would cost a page fault per page."""
    if not hasattr(_thread_buffers, "wide") or _thread_buffers.wide.shape[1] < length:
        _thread_buffers.wide = np.empty((3, max(CHUNK, length)))
        _thread_buffers.narrow = np.empty(max(CHUNK, length), np.float32)
    a, b, c = _thread_buffers.wide[:, :length]
    return a, b, c, _thread_buffers.narrow[:length]
