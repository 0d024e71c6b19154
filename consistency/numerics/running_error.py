r"""Exact values with a bound on the error of a device, step by step: running error analysis in float64.

A `Tracked` array holds the exact value of every element, in float64, and a bound on the error of a device that takes
the same steps in its own arithmetic (Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., section 3.3,
with the terms of second order kept). So the bound of a softmax or of an attention follows step by step from those of
its parts:

* The error of a sum, product or quotient is that of its operands and one rounding.
* That of an inner product or a sum of n terms, in any order, is :math:`\gamma_n` times the sum of the magnitudes
  (lemma 3.1); units that truncate when they accumulate have twice the unit roundoff, and operands in TF32 add
  :math:`2t + t^2`, :math:`t = 2^{-10}` (see `consistency.numerics.precision`, for bfloat16 and partial sums too).
* The error of a library function is its derivative times the error of its argument, and `ULPS` units in the last
  place.
* bfloat16 and float16 are computed in float32 and rounded where a library stores them: `Tracked.store`. A library that
  stores less often has a smaller error.
* A compiler such as XLA is given single steps whose results have the half type (`Arithmetic.steps`): each is rounded,
  and a sum of n terms has :math:`\gamma_n` with the half type's own unit roundoff.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from consistency.numerics.bound import gamma
from consistency.numerics.dtype import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF, name_of, named
from consistency.numerics.error import measure_against_exact
from consistency.numerics.measure import Measure
from consistency.numerics.precision import Precision, partial_sums_error

ULPS = {"exp": 3.0, "log": 3.0, "tanh": 5.0, "sin": 4.0, "cos": 4.0, "sqrt": 3.0, "rsqrt": 2.0, "/": 2.5}
"""Largest error of a library function, in units in the last place.

These are the limits of OpenCL for single precision (*The OpenCL C Specification*, "Relative error as ULPs", full
profile), the widest among the documents that apply to our devices: SLEEF's functions on the CPU promise 1.0
and 3.5 (its names end in `u10` and `u35`), MKL's 1 (`VML_HA`), CUDA's 1 or 2 (*CUDA C++ Programming Guide*, appendix
on mathematical functions).
"""

ERF_UNITS = 32.0
"""Largest error of erf, in unit roundoffs of 1: OpenCL allows 16 ULP of two each; the polynomial of CPU kernels
(Abramowitz and Stegun, 7.1.26) has an error of 1.5e-7, some 2.5 of them, and its own roundings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How a device computes in one dtype."""

    unit: float
    floor: float
    """`unit`, `floor`: unit roundoff of the dtype that it computes in, and half that dtype's smallest subnormal."""
    product: float
    """Unit roundoff of the accumulation of inner products."""
    products: Precision = Precision.FLOAT32
    """Precision in which float32 products may run."""
    partial_terms: int | None = None
    """Terms of a partial sum, where those of a half type may be stored in that type."""
    stored: float = 0.0
    stored_floor: float = 0.0
    """`stored`, `stored_floor`: unit roundoff of the dtype, and half its smallest subnormal, if it is narrower than the
    computation; else 0."""
    steps: bool = False
    """Whether each step rounds to the narrower dtype, sums too; inner products are added up in the wider one."""
    shares: int = 1
    """2 if the reference has no wider dtype, and so as large an error; else 1."""

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        *,
        truncating: bool = False,
        products: Precision = Precision.FLOAT32,
        partial_terms: int | None = None,
        steps: bool = False,
    ) -> Arithmetic:
        """Return the arithmetic of a dtype.

        Parameters
        ----------
        truncating : bool
            Whether bfloat16 and float16 are multiplied on units that truncate when they accumulate.
        products : Precision
            Precision in which float32 products may run; unless it is float32 itself, on units that truncate too.
        partial_terms : int or None
            Terms of a partial sum, where those of a half type may be stored in that type.
        steps : bool
            Whether bfloat16 and float16 are rounded after each step.
        """
        if dtype == torch.float64:
            unit, floor = UNIT_ROUNDOFF[dtype], HALF_SMALLEST_SUBNORMAL[dtype]
            return cls(unit=unit, floor=floor, product=unit, shares=2)
        unit, floor = UNIT_ROUNDOFF[torch.float32], HALF_SMALLEST_SUBNORMAL[torch.float32]
        if dtype in (torch.bfloat16, torch.float16):
            return cls(
                unit=unit,
                floor=floor,
                product=2 * unit if truncating else unit,
                partial_terms=partial_terms,
                stored=UNIT_ROUNDOFF[dtype],
                stored_floor=HALF_SMALLEST_SUBNORMAL[dtype],
                steps=steps,
            )
        product = unit if products is Precision.FLOAT32 else 2 * unit
        return cls(unit=unit, floor=floor, product=product, products=products)

    def known(self, values: np.ndarray) -> Tracked:
        """Return inputs of the device, which have no error."""
        return Tracked(value=values, error=np.zeros_like(values), by=self)

    def constant(self, value: float) -> Tracked:
        """Return a constant of the program, which the device rounds once."""
        exact = np.asarray(value, dtype=np.float64)
        return Tracked(value=exact, error=np.abs(exact) * self.unit, by=self).stepped()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """Exact values, and a bound on the error of a device that computes them by an arithmetic: float64 of one shape."""

    value: np.ndarray
    error: np.ndarray
    by: Arithmetic
    """The device's arithmetic."""

    @property
    def allowed(self) -> np.ndarray:
        """Return the tolerance of each element."""
        return self.error * self.by.shares

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> Tracked:
        """Move elements, as a function moves them in an array: nothing is computed."""
        return self._with(move(self.value), move(self.error))

    def __neg__(self) -> Tracked:
        return self._with(-self.value, self.error)

    def __add__(self, other: Tracked) -> Tracked:
        return self._rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Tracked) -> Tracked:
        return self + -other

    def __mul__(self, other: Tracked) -> Tracked:
        error = times(np.abs(self.value), other.error) + times(self.error, np.abs(other.value) + other.error)
        return self._rounded(self.value * other.value, error)

    def __truediv__(self, other: Tracked) -> Tracked:
        value = self.value / other.value
        error = over(self.error + times(np.abs(value), other.error), np.abs(other.value) - other.error)
        return self._rounded(value, error, ulps=ULPS["/"])

    def exp(self) -> Tracked:
        value = np.exp(self.value)
        # beyond 700 the exponential would overflow
        return self._rounded(value, value * np.expm1(np.minimum(self.error, 700.0)), ulps=ULPS["exp"])

    def log(self) -> Tracked:
        return self._rounded(np.log(self.value), over(self.error, self.value - self.error), ulps=ULPS["log"])

    def sqrt(self) -> Tracked:
        value = np.sqrt(self.value)
        # the square roots of x and of x - e differ by no more than that of e, and near x by e over their sum
        return self._rounded(value, np.minimum(over(self.error, value), np.sqrt(self.error)), ulps=ULPS["sqrt"])

    def rsqrt(self) -> Tracked:
        value = 1 / np.sqrt(self.value)
        # the function is convex, so the error is largest on the side of zero
        largest = over(np.ones_like(value), np.sqrt(np.maximum(self.value - self.error, 0)))
        return self._rounded(value, largest - value, ulps=ULPS["rsqrt"])

    def tanh(self) -> Tracked:
        return self._rounded(np.tanh(self.value), self.error, ulps=ULPS["tanh"])

    def sin(self) -> Tracked:
        return self._rounded(np.sin(self.value), self.error, ulps=ULPS["sin"])

    def cos(self) -> Tracked:
        return self._rounded(np.cos(self.value), self.error, ulps=ULPS["cos"])

    def erf(self) -> Tracked:
        value = np.reshape([math.erf(x) for x in self.value.ravel()], self.value.shape)
        return self._with(value, self.error * 2 / math.sqrt(math.pi) + ERF_UNITS * self.by.unit).stepped()

    def max(self, *, axis: int = -1) -> Tracked:
        """Return the largest element along an axis, which stays, with one element."""
        return self.moved(lambda x: x.max(axis=axis, keepdims=True))

    def sum(self, *, axis: int = -1) -> Tracked:
        """Add up along an axis, which stays, with one element; in any order."""
        return self._added(lambda x: x.sum(axis=axis, keepdims=True), axis)

    def cumsum(self, *, axis: int = -1) -> Tracked:
        """Add up along an axis as far as each element; in any order."""
        return self._added(lambda x: x.cumsum(axis=axis), axis)

    def matmul(self, other: Tracked) -> Tracked:
        """Multiply matrices, or stacks of them."""
        terms = self.value.shape[-1]
        left_size, right_size = np.abs(self.value) + self.error, np.abs(other.value) + other.error
        # accumulation in any order, and the rounding of each product's operands
        factor = gamma(terms, self.by.product) + self.by.products.product_error
        if self.by.partial_terms is not None:
            factor += partial_sums_error(terms, self.by.stored, each=self.by.partial_terms)
        # besides, each product and each sum may be rounded to a subnormal, or flushed to zero
        error = factor * np.matmul(left_size, right_size) + terms * (self.by.floor + 2 * self.by.products.smallest)
        if self.error.any() or other.error.any():  # exact operands add no error
            error = error + np.matmul(left_size, other.error) + np.matmul(self.error, np.abs(other.value))
        return self._with(np.matmul(self.value, other.value), error)

    def store(self) -> Tracked:
        """Round to the dtype, if it is narrower than the computation."""
        error = self.error + self.by.stored * (np.abs(self.value) + self.error) + self.by.stored_floor
        return self._with(self.value, error)

    def stepped(self) -> Tracked:
        """Round to the dtype where each step does."""
        return self.store() if self.by.steps else self

    def _with(self, value: np.ndarray, error: np.ndarray) -> Tracked:
        return Tracked(value=value, error=error, by=self.by)

    def _added(self, add: Callable[[np.ndarray], np.ndarray], axis: int) -> Tracked:
        """Add up by a function, with the error of as many terms as there are along an axis, in any order."""
        size = np.abs(self.value) + self.error
        terms = self.value.shape[axis]
        unit = self.by.stored if self.by.steps else self.by.unit
        if terms * unit >= 1:  # lemma 3.1 says nothing then
            return self._with(add(self.value), np.full_like(add(size), np.inf))
        return self._with(add(self.value), add(self.error + gamma(terms, unit) * size))

    def _rounded(self, value: np.ndarray, error: np.ndarray, *, ulps: float = 0.5) -> Tracked:
        """Add the rounding of one step; a unit in the last place is at most two unit roundoffs of the value."""
        unit = 2 * ulps * self.by.unit
        return self._with(value, error + unit * (np.abs(value) + error) + 2 * ulps * self.by.floor).stepped()


def times(size: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Multiply magnitudes; zero times infinity is zero, for none of an unbounded error is no error."""
    with np.errstate(invalid="ignore"):
        return np.where((size == 0) | (error == 0), 0.0, size * error)


def over(error: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Divide an error by the least magnitude of the value that it is relative to; infinite where that may be zero."""
    relative = np.full(np.broadcast_shapes(np.shape(error), np.shape(least)), np.inf)
    np.divide(error, least, out=relative, where=least > 0)
    return relative


class Bounded(Protocol):
    """Exact values with the tolerance of each, float64 of one shape."""

    @property
    def value(self) -> np.ndarray: ...

    @property
    def allowed(self) -> np.ndarray: ...


def measure_tracked(actual: torch.Tensor, exact: Bounded) -> Measure:
    """Measure how far a tensor on the CPU is from exact values of its shape, by the tolerance of each element."""
    value, allowed = (torch.from_numpy(np.ascontiguousarray(array)) for array in (exact.value, exact.allowed))
    return measure_against_exact(actual, value, allowed)


_U64 = UNIT_ROUNDOFF[torch.float64]
"""Unit roundoff of the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """An exact sum, and the tolerance of each element: float64 of one shape."""

    value: np.ndarray
    allowed: np.ndarray


def exact_sum(terms: torch.Tensor, *, average: bool) -> Sum:
    """Return the exact sum over the first dimension, or the average, with the tolerance of one in the terms' dtype.

    Parameters
    ----------
    terms : torch.Tensor
        `(n, ...)` of a floating-point dtype, on the CPU, added up in any order.
    """
    exact = terms.to(torch.float64).numpy()
    weight = 1 / len(exact) if average else 1.0
    allowed = sum_error(np.abs(exact).sum(0) * weight, len(exact), name_of(terms.dtype), average=average)
    return Sum(value=exact.sum(0) * weight, allowed=allowed)


def sum_error(sizes: np.ndarray, count: int, dtype: str, *, average: bool) -> np.ndarray:
    r"""Return the largest error of sums of n terms, in any order, that a device and a float64 reference make.

    It is at most :math:`\gamma_{n-1} \sum |x_i|`. Where a sum is divided by n, or its terms are multiplied by the
    rounded 1/n, two roundings more. Each rounding may be to a subnormal.

    Parameters
    ----------
    sizes : np.ndarray
        Sum of the magnitudes of each element's terms, divided by n for an average.
    count : int
        n.
    dtype : str
        Name of the dtype in which the device adds.
    """
    roundings = count + 1 if average else count - 1
    weight = gamma(roundings, UNIT_ROUNDOFF[named(dtype)]) + gamma(count + 1, _U64)
    error: np.ndarray = weight * sizes + roundings * HALF_SMALLEST_SUBNORMAL[named(dtype)]
    return error
