"""Measure how far a computed tensor is from an exact (float64) reference, in one pass over chunks that stay in cache.

NumPy measures on the CPU: its reductions are vectorised, and it writes into buffers that are reused. Infinities and NaN
are handled only if a reduction shows that there are any.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable

import numpy as np
import torch

from consistency.numerics.bound import UserAllowance
from consistency.numerics.chunks import CHUNK, Chunk, exact_chunks
from consistency.numerics.distance import NO_WORST, describe_worst
from consistency.numerics.dtype import bit_patterns
from consistency.numerics.kernels.numpy_distance import numbers_of, square_sum
from consistency.numerics.kernels.tally import is_worse, worse
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from consistency.numerics.steps import Steps


class ErrorTally:
    """Accumulate a `Measure` of a tensor of floats against an exact reference, chunk by chunk."""

    def __init__(self, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype
        self._mismatched = 0
        self._max_abs = self._max_rel = self._sum = self._squares = self._magnitude = 0.0
        self._max_ulp: int | None = 0
        self._ratio: float | None = None
        self._worst = (0.0, NO_WORST)

    def add(self, chunk: Chunk) -> None:
        """Add a chunk; its arrays are left as they are."""
        if chunk.actual.numel():
            with np.errstate(all="ignore"):  # values that are not finite are settled below
                self._add(chunk.actual, chunk.exact, chunk.allowed, chunk.start)

    def _add(self, actual: torch.Tensor, exact: np.ndarray, allowed: np.ndarray | None, start: int) -> None:
        difference, quotient, size, narrow = _buffers(len(exact))
        rounded = _rounded(exact, self._dtype, narrow)
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
        self._max_abs = worse(self._max_abs, largest)
        self._sum += total
        self._squares += square_sum(difference)
        badness = difference
        if allowed is not None:
            badness = _divided(difference, allowed, quotient)
            self._ratio = worse(self._ratio or 0.0, float(np.maximum.reduce(badness)))
        self._see_worst(actual, exact, rounded, badness, start)
        np.abs(exact, out=size)
        self._see_magnitude(size)
        relative = _divided(difference, size, quotient)
        if not math.isfinite(largest):
            relative[np.isinf(difference)] = math.inf  # not NaN where the reference is infinite too
        self._max_rel = worse(self._max_rel, float(np.maximum.reduce(relative)))
        mismatched = int(np.count_nonzero(np.not_equal(x, y)))
        self._mismatched += mismatched
        if mismatched:
            self._see_ulp(x, y, largest, both_nan)

    def result(self) -> Measure:
        n = max(1, math.prod(self._shape))
        return Measure(
            elements=math.prod(self._shape),
            mismatched=self._mismatched,
            max_abs=Real(self._max_abs),
            mean_abs=Real(self._sum / n),
            rms=Real(math.sqrt(self._squares / n) if not math.isnan(self._squares) else math.nan),
            max_rel=Real(self._max_rel),
            max_ulp=self._max_ulp,
            bound_ratio=None if self._ratio is None else Real(self._ratio),
            magnitude=Real(self._magnitude),
            **self._worst[1],
        )

    def _see_worst(
        self, actual: torch.Tensor, exact: np.ndarray, rounded: torch.Tensor, badness: np.ndarray, start: int
    ) -> None:
        score = float(np.maximum.reduce(badness))
        if is_worse(score, self._worst[0]):  # an exact result has no worst element
            i = int(np.argmax(badness))
            fields = describe_worst(start + i, self._shape, actual[i], rounded[i], float(exact[i]))
            self._worst = (score, fields)

    def _see_magnitude(self, size: np.ndarray) -> None:
        largest = float(np.maximum.reduce(size))
        if not math.isfinite(largest):
            largest = float(np.max(size, where=np.isfinite(size), initial=0.0))
        self._magnitude = max(self._magnitude, largest)

    def _see_ulp(self, x: np.ndarray, y: np.ndarray, largest: float, both_nan: np.ndarray | None) -> None:
        if self._max_ulp is None or not self._dtype.is_floating_point or math.isnan(largest):
            self._max_ulp = None
            return
        steps = Steps.between(x, y, np.bitwise_xor(x, y))
        self._max_ulp = max(self._max_ulp, steps.largest if both_nan is None else steps.without(both_nan))


def measure_chunks(actual: torch.Tensor, chunks: Iterable[Chunk]) -> Measure:
    """Measure how far a tensor is from its exact value, given as the chunks of both."""
    tally = ErrorTally(shape=tuple(actual.shape), dtype=actual.dtype)
    for chunk in chunks:
        tally.add(chunk)
    return tally.result()


def measure_against_exact(actual: torch.Tensor, exact: torch.Tensor, allowance: UserAllowance | None = None) -> Measure:
    """Measure how far a tensor is from a float64 reference of the same shape, both on the CPU.

    Without an allowance there is no `bound_ratio`: only the tolerance of the tensor as a whole is known then.
    """
    return measure_chunks(actual, exact_chunks(actual, exact, allowance))


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


_kept = threading.local()


def _buffers(length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return three float64 buffers and a float32 buffer of this thread: new ones would cost a page fault per page."""
    if not hasattr(_kept, "wide") or _kept.wide.shape[1] < length:
        _kept.wide, _kept.narrow = np.empty((3, max(CHUNK, length))), np.empty(max(CHUNK, length), np.float32)
    a, b, c = _kept.wide[:, :length]
    return a, b, c, _kept.narrow[:length]
