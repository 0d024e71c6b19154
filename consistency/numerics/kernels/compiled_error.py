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
    """Measure a tensor with the kernel, stretch by stretch; NumPy measures the chunks that the kernel leaves out.

    Those are the chunks in which something is not finite.

    Parameters
    ----------
    chunk : int
        Elements that share a sum.
    """

    def __init__(self, kernel: Kernel, *, chunk: int = CHUNK) -> None:
        self._kernel = kernel
        self._chunk = chunk
        self._by_kernel = Errors(worst=-1)
        self._by_numpy = ErrorTally()
        self._sums: list[np.ndarray] = []
        self._has_ratio = False

    def add(self, stretch: Stretch) -> None:
        """Add a stretch that `fits`."""
        elements = len(stretch.value)
        if not elements:
            return
        sums = np.empty((2, -(-elements // self._chunk)))
        computed = _computed(stretch)
        self._has_ratio = self._has_ratio or computed.allowance != ALLOWANCES.index("none")
        kind = name_of(stretch.actual.dtype)
        # The kernel updates `_by_kernel` and fills `sums`, both without the chunks that it leaves out.
        left_out = self._kernel.errors(
            kind, computed, self._by_kernel, start=stretch.start, elements=elements, chunk=self._chunk, sums=sums
        )
        self._sums.append(sums)
        for number in left_out.tolist():
            self._by_numpy.include(errors_by_numpy(stretch.chunk(number * self._chunk, self._chunk)))

    def tally(self) -> ErrorTally:
        """Return the tally of all stretches so far."""
        errors = self._by_kernel
        tally = ErrorTally(
            mismatched=errors.mismatched,
            max_abs=errors.max_abs,
            max_rel=errors.max_rel,
            max_ulp=errors.max_ulp,
            ratio=errors.ratio if self._has_ratio else None,
            magnitude=errors.magnitude,
        )
        for sums in self._sums:
            tally.sums += sums[0].tolist()
            tally.squares += sums[1].tolist()
        if errors.worst >= 0:
            score = errors.ratio if self._has_ratio else errors.max_abs
            tally.worst = WorstError(score=score, index=errors.worst, exact=errors.worst_exact)
        tally.include(self._by_numpy)
        return tally


def fits(stretch: Stretch) -> bool:
    """Report whether the kernel can measure a stretch: arrays without gaps, the base in the tested dtype."""
    actual, base = stretch.actual, stretch.base
    if name_of(actual.dtype) not in KINDS or not actual.is_contiguous():
        return False
    if base is not None and (base.dtype != actual.dtype or not base.is_contiguous()):
        return False
    arrays = [array for array in (stretch.value, stretch.size) if array is not None]
    return all(array.dtype == np.float64 and array.flags.c_contiguous for array in arrays)


def _computed(stretch: Stretch) -> Computed:
    """Return the arrays and the allowance of a stretch as the kernel takes them, by the addresses of the arrays."""
    base, allowance, size = stretch.base, stretch.allowance, stretch.size
    computed = Computed(actual=stretch.actual.data_ptr(), value=stretch.value.ctypes.data)
    if base is not None:
        computed.base = base.data_ptr()
    if isinstance(allowance, UserAllowance):
        computed.allowance = ALLOWANCES.index("user")
        computed.product_or_rtol, computed.floor_or_atol = allowance.rtol, allowance.atol
    elif isinstance(allowance, Allowance) and size is not None:
        computed.allowance = ALLOWANCES.index("derived")
        computed.product_or_rtol, computed.weight = allowance.product, allowance.weight
        computed.floor_or_atol = allowance.floor
    elif size is not None:
        computed.allowance = ALLOWANCES.index("given")  # without a rule, `size` is the tolerance of each element
    if size is not None:
        computed.size = size.ctypes.data
    return computed
