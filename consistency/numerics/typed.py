r"""Exact values with torch's dtypes: the bound follows the code's own steps and their roundings.

`Typed` values are written like the torch code that they are the reference of. Each has its exact value in float64 and a
bound on the error of a device that takes the same steps in torch's dtypes:

* An operation computes in the dtype that torch promotes its operands to; bfloat16 and float16 are computed in float32
  and rounded where the result is stored (*opmath* in torch's kernels).
* A sum, a product or a conversion rounds to nearest, by at most half a unit in the last place: the unit roundoff
  times the largest power of two that is not above the computed value. That is up to twice as sharp as the unit roundoff
  times the value. A quotient is off by at most 2.5 units (`running_error.ULPS`): not every device divides exactly.
* A matrix product has the bound of an inner product in any order, in the precision that is permitted
  (`running_error.Tracked.matmul`).
* Errors of operands pass on with their terms of second order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from consistency.numerics.bound import gamma
from consistency.numerics.dtype import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from consistency.numerics.precision import partial_sums_error
from consistency.numerics.running_error import ULPS, Arithmetic, Tracked, over

HALF_TYPES = frozenset({torch.bfloat16, torch.float16})

REFERENCE = 2.0**-26
"""Fraction of a bound that is added for the reference's own roundings, with room: each is 2⁻²⁹ of the rounding of the
same step in float32, and its sum with the base is rounded by 2⁻⁵³ of it, where the device may round by 2⁻²⁵. Without it
a tie would be outside by the last bit."""

_EXPONENT = np.int64(0x7FF0_0000_0000_0000)
"""Bits of the exponent of a float64."""

ArithmeticOf = Callable[[torch.dtype], Arithmetic]
"""Return how a device computes products in a dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """Exact values, a bound on the error of each on a device, and the dtype in which the device holds them."""

    value: np.ndarray
    error: np.ndarray
    dtype: torch.dtype

    @classmethod
    def known(cls, tensor: torch.Tensor) -> Typed:
        """Return a tensor that the device holds to the bit."""
        value = tensor.detach().to(torch.float64).numpy()
        return cls(value=value, error=np.zeros_like(value), dtype=tensor.dtype)

    @property
    def allowed(self) -> np.ndarray:
        """Return the tolerance of each element: the bound, and the error of the reference in the same steps."""
        factor = 2 if self.dtype == torch.float64 else 1 + REFERENCE
        return self.error * factor

    @property
    def size(self) -> np.ndarray:
        """Return for each element the largest magnitude that the device may have computed."""
        return np.asarray(np.abs(self.value) + self.error)

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> Typed:
        """Move or repeat elements: nothing is computed."""
        return replace(self, value=move(self.value), error=move(self.error))

    def __add__(self, other: Typed) -> Typed:
        dtype = torch.promote_types(self.dtype, other.dtype)
        return stored(self.value + other.value, self.error + other.error, dtype)

    def __mul__(self, other: Typed) -> Typed:
        dtype = torch.promote_types(self.dtype, other.dtype)
        error = np.abs(self.value) * other.error + self.error * other.size
        return stored(self.value * other.value, error, dtype)

    def __truediv__(self, other: Typed) -> Typed:
        dtype = torch.promote_types(self.dtype, other.dtype)
        value = self.value / other.value
        error = over(self.error + np.abs(value) * other.error, np.abs(other.value) - other.error)
        return stored(value, error, dtype, ulps=ULPS["/"])

    def scaled(self, scale: float, *, held_in: torch.dtype = torch.float64) -> Typed:
        """Multiply by a number that the program holds in a dtype, and a kernel converts to its own or the tensor's."""
        dtypes = {held_in} if self.dtype == torch.float64 else {torch.float32, self.dtype}
        exact_scale = torch.tensor(scale, dtype=torch.float64)
        scale_error = max(abs(scale - exact_scale.to(dtype).item()) for dtype in dtypes)
        error = np.abs(self.value) * scale_error + self.error * (abs(scale) + scale_error)
        return stored(self.value * scale, error, self.dtype)

    def matmul(self, other: Typed, arithmetic: ArithmeticOf) -> Typed:
        """Multiply matrices of one dtype, or stacks of them."""
        by = arithmetic(self.dtype)
        left, right = (Tracked(value=operand.value, error=operand.error, by=by) for operand in (self, other))
        product = left.matmul(right).store()
        return Typed(value=product.value, error=product.error, dtype=self.dtype)

    def to(self, dtype: torch.dtype) -> Typed:
        """Convert: where the dtype does not hold all values of this one, each is rounded; float64 through float32."""
        if torch.promote_types(self.dtype, dtype) == dtype:
            return replace(self, dtype=dtype)
        if self.dtype == torch.float64 and dtype in HALF_TYPES:
            return self.to(torch.float32).to(dtype)
        return Typed(value=self.value, error=self.error + half_ulp(self.size, dtype), dtype=dtype)


def stored(value: np.ndarray, error: np.ndarray, dtype: torch.dtype, *, ulps: float = 0.5) -> Typed:
    """Return a computed value with the roundings of its last step: of the computation, and of the store.

    Parameters
    ----------
    value, error : np.ndarray
        The exact value, and the error before the last step is rounded.
    ulps : float
        Largest error of the last step, in units in the last place.
    """
    computed_in = torch.float32 if dtype in HALF_TYPES else dtype
    error = error + 2 * ulps * half_ulp(np.abs(value) + error, computed_in)
    if dtype in HALF_TYPES:
        error = error + half_ulp(np.abs(value) + error, dtype)
    return Typed(value=value, error=error, dtype=dtype)


def half_ulp(size: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return the largest error of rounding a number of at most this magnitude to nearest."""
    # the exponent's bits alone are the largest power of two that is not above; of zero they are zero
    power = (np.ascontiguousarray(size, dtype=np.float64).view(np.int64) & _EXPONENT).view(np.float64)
    return np.maximum(power * UNIT_ROUNDOFF[dtype], HALF_SMALLEST_SUBNORMAL[dtype]).reshape(np.shape(size))


def tucker(core: Typed, rows: Typed, columns: Typed, arithmetic: ArithmeticOf) -> Typed:
    r"""Return :math:`\sum_{ij} c_{ijk} a_{ip} b_{jr}` as `(p, r, k)`, its two sums taken in either order.

    Parameters
    ----------
    core : Typed
        `(r, r, k)`: known, as the factors are.
    rows, columns : Typed
        `(r, p)` and `(r, r')`.

    Notes
    -----
    Each term passes through one inner product of each factor, with a relative error of at most :math:`g` (see
    `running_error.Tracked.matmul`), and through a store of each: :math:`((1 + g)^2 (1 + u)^2 - 1) \sum |c| |a| |b|`,
    whichever sum is taken first.
    """
    by, rank = arithmetic(core.dtype), core.value.shape[0]
    relative = gamma(rank, by.product) + by.products.product_error
    if by.partial_terms is not None:
        relative += partial_sums_error(rank, by.stored, each=by.partial_terms)

    def contracted(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        inner = np.tensordot(c, b, axes=(1, 0))  # (i, k, r')
        return np.tensordot(a, inner, axes=(0, 0)).transpose(0, 2, 1)

    sizes = [np.abs(operand.value) for operand in (core, rows, columns)]
    factor = math.expm1(2 * (math.log1p(relative) + math.log1p(by.stored)))
    floor = rank * (by.floor + 2 * by.products.smallest) + by.stored_floor
    largest = max((float(size.max(initial=0.0)) for size in sizes[1:]), default=0.0)
    error = factor * contracted(*sizes) + floor * (1 + rank * largest) * (1 + factor)
    return Typed(value=contracted(core.value, rows.value, columns.value), error=error, dtype=core.dtype)
