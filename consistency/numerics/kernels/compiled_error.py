"""Measure how far a computed tensor is from an exact (float64) reference, with the compiled kernel."""

from __future__ import annotations

import numpy as np

from consistency.numerics.bound import Allowance, UserAllowance
from consistency.numerics.chunks import CHUNK, Stretch
from consistency.numerics.dtype import name_of
from consistency.numerics.kernels.compiled import ALLOWANCES, KINDS, Computed, Errors, Kernel
from consistency.numerics.kernels.numpy_error import errors_by_numpy
from consistency.numerics.kernels.tally import ErrorTally, WorstError


class CompiledErrors:
    """What the kernel saw of a tensor, stretch by stretch; NumPy measures the chunks in which it saw no finite number.

    `chunk` is how many elements share a sum.
    """

    def __init__(self, kernel: Kernel, *, chunk: int = CHUNK) -> None:
        self._kernel = kernel
        self._chunk = chunk
        self._seen = Errors(worst=-1)
        self._by_numpy = ErrorTally()
        self._sums: list[np.ndarray] = []
        self._has_ratio = False

    def add(self, stretch: Stretch) -> None:
        """Add a stretch that `fits`."""
        elements = len(stretch.value)
        if not elements:
            return
        sums = np.empty((2, -(-elements // self._chunk)))
        of = _computed(stretch)
        self._has_ratio = self._has_ratio or of.allowance != ALLOWANCES.index("none")
        kind = name_of(stretch.actual.dtype)
        left_out = self._kernel.errors(
            kind, of, self._seen, start=stretch.start, elements=elements, chunk=self._chunk, sums=sums
        )
        self._sums.append(sums)
        for number in left_out.tolist():
            self._by_numpy.include(errors_by_numpy(stretch.chunk(number * self._chunk, self._chunk)))

    def tally(self) -> ErrorTally:
        seen, sums = self._seen, self._sums
        found = ErrorTally(
            mismatched=seen.mismatched,
            max_abs=seen.max_abs,
            max_rel=seen.max_rel,
            max_ulp=seen.max_ulp,
            ratio=seen.ratio if self._has_ratio else None,
            magnitude=seen.magnitude,
            sums=[value for one in sums for value in one[0].tolist()],
            squares=[value for one in sums for value in one[1].tolist()],
        )
        if seen.worst >= 0:
            score = seen.ratio if self._has_ratio else seen.max_abs
            found.worst = WorstError(score=score, index=seen.worst, exact=seen.worst_exact)
        found.include(self._by_numpy)
        return found


def fits(stretch: Stretch) -> bool:
    """Report whether the kernel can measure a stretch: arrays without gaps, the base in the tested dtype."""
    actual, base = stretch.actual, stretch.base
    return (
        name_of(actual.dtype) in KINDS
        and actual.is_contiguous()
        and (base is None or (base.dtype == actual.dtype and base.is_contiguous()))
        and all(a is None or (a.dtype == np.float64 and a.flags.c_contiguous) for a in (stretch.value, stretch.size))
    )


def _computed(stretch: Stretch) -> Computed:
    base, allowance, size = stretch.base, stretch.allowance, stretch.size
    of = Computed(actual=stretch.actual.data_ptr(), value=stretch.value.ctypes.data)
    if base is not None:
        of.base = base.data_ptr()
    if isinstance(allowance, UserAllowance):
        of.allowance = ALLOWANCES.index("user")
        of.product_or_rtol, of.floor_or_atol = allowance.rtol, allowance.atol
    elif size is not None:
        of.allowance = ALLOWANCES.index("given")
        if isinstance(allowance, Allowance):
            of.allowance = ALLOWANCES.index("derived")
            of.product_or_rtol, of.weight, of.floor_or_atol = allowance.product, allowance.weight, allowance.floor
    if size is not None:
        of.size = size.ctypes.data
    return of
