r"""Bounds on the error of a computed tensor, derived.

A LoRA merge computes :math:`W' = W + s\,(B A)` with rank :math:`K`. With :math:`D = |s|\,(|B|\,|A|)` elementwise and
:math:`\gamma_n = n u / (1 - n u)` (Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., lemma 3.1):

* The error of an inner product of length K in float32, in any order, is at most :math:`\gamma_K`; the scaling is itself
  rounded to float32 and multiplied, two more roundings: :math:`|\hat\delta - \delta| \le \gamma_{K+2} D` with
  :math:`u = 2^{-24}`. Units that truncate when they accumulate (tensor cores, which bfloat16 and float16 operands
  reach) have twice the unit roundoff.
* Where float32 products run in TF32 each operand is first cut to 10 stored mantissa bits, off by at most
  :math:`t = 2^{-10}` where the unit truncates (half of it where it rounds; which one does is not documented):
  :math:`(2 t + t^2) D` more, and the accumulation truncates. Where they run in bfloat16 (float32 matmul precision
  `medium` on a CPU with such units) each operand is rounded, :math:`t = 2^{-8}`.
* Where partial sums of half types may be stored in that type: :math:`((1 + u_{\text{adapter}})^m - 1) D` more, with m
  of them (`consistency.numerics.precision`).
* An adapter in bfloat16 or float16 stores the product, the scaling and the delta: three roundings more,
  :math:`3 u_{\text{adapter}} D`.
* The store of :math:`W'` rounds once, :math:`u_W (|W| + D)`; a safe merge and an embedding's merge round the delta to
  the weight's dtype first: twice.
* PEFT adds the finished delta to W; a fused product that accumulates into W rounds |W| K times and has a different
  bound.
* Each rounding to a subnormal adds at most half the smallest subnormal of its dtype.

Between two devices the bound is twice as large, since each may use it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from consistency.numerics.dtype import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from consistency.numerics.precision import Precision, partial_sums_error

Array = TypeVar("Array", np.ndarray, torch.Tensor)

_FLOAT32 = UNIT_ROUNDOFF[torch.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The tolerance of an element: `product * D + weight * |W| + floor`.

    D is the sum of magnitudes in the element's inner product, W the base weight; `floor` is from roundings to
    subnormals.
    """

    product: float
    weight: float = 0.0
    floor: float = 0.0

    def around(self, size: Array, weight: Array | None = None) -> Array:
        """Return the tolerance of each element, in the memory of `size`, which is overwritten.

        Parameters
        ----------
        size : array or Tensor
            D, in float64.
        weight : array or Tensor, optional
            W, in float64; None for a delta.
        """
        size *= self.product
        if weight is not None:
            size += abs(weight) * self.weight
        size += self.floor
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class UserAllowance:
    """The tolerance of an element as set by the user: `atol + rtol * |exact|`, `atol` in the tensor's own unit."""

    atol: float
    rtol: float

    def around(self, exact: np.ndarray) -> np.ndarray:
        """Return the tolerance of each element of a chunk of float64 values."""
        with np.errstate(all="ignore"):  # a user's tolerance may overflow: then any value passes
            allowed: np.ndarray = np.abs(exact)
            allowed *= self.rtol
            allowed += self.atol
        return allowed


def gamma(n: int, u: float) -> float:
    """Return :math:`n u / (1 - n u)`, a bound on the relative error of n roundings."""
    return n * u / (1 - n * u)


def delta_allowance(
    rank: int,
    *,
    scaling: float,
    adapter: torch.dtype,
    truncating: bool = False,
    products: Precision = Precision.FLOAT32,
    partial_terms: int | None = None,
) -> Allowance:
    """Bound the error of a LoRA delta; the terms are derived in the first lines of this file.

    Parameters
    ----------
    rank : int
        K: terms of each inner product.
    scaling : float
        s.
    adapter : torch.dtype
        Dtype of the adapter's parameters on the device.
    truncating : bool
        Whether the device multiplies this dtype on units that truncate when they accumulate.
    products : Precision
        Precision in which float32 products may run; unless it is float32 itself, on units that truncate too.
    partial_terms : int or None
        Terms of a partial sum, where those of a half type may be stored in that type.
    """
    reduced = adapter == torch.float32 and products is not Precision.FLOAT32
    truncating = truncating or reduced
    # truncation has twice the error of rounding to nearest
    u = 2 * _FLOAT32 if truncating else _FLOAT32
    product = gamma(rank + 2, u)
    floor = HALF_SMALLEST_SUBNORMAL[torch.float32] * (rank * abs(scaling) + 2)
    if adapter in (torch.bfloat16, torch.float16):
        product += 3 * UNIT_ROUNDOFF[adapter]
        floor += HALF_SMALLEST_SUBNORMAL[adapter] * (abs(scaling) + 2)
        if partial_terms is not None:
            product += partial_sums_error(rank, UNIT_ROUNDOFF[adapter], each=partial_terms)
    elif reduced:
        product += products.product_error
        floor += 2 * rank * abs(scaling) * products.smallest  # of each product, and of each sum
    elif adapter == torch.float64:
        product = gamma(rank + 2, UNIT_ROUNDOFF[torch.float64])
    return Allowance(product=product, floor=floor)


def merged_in_turn_allowance(deltas: Sequence[Allowance], *, weight: torch.dtype, roundings: int) -> Allowance:
    r"""Bound the error of a weight to which several deltas are added, each sum rounded to the weight's dtype.

    With n deltas and k roundings of each sum, the delta that is added first is rounded :math:`n k` times:
    :math:`\gamma_{nk} (|W| + \sum_i D_i)`, and the deltas' own errors grow by as much.
    """
    times = len(deltas) * roundings
    growth = gamma(times, UNIT_ROUNDOFF[weight])
    product = max(delta.product for delta in deltas)
    floor = sum(delta.floor for delta in deltas) + times * HALF_SMALLEST_SUBNORMAL[weight]
    return Allowance(product=product + growth * (1 + product), weight=growth, floor=floor * (1 + growth))


def cycles_allowance(deltas: Sequence[Allowance], *, weight: torch.dtype, cycles: int) -> Allowance:
    r"""Bound how far a weight is from itself after cycles in which all deltas are added and then subtracted.

    Both times the delta has the same bits, so its own error cancels. Of n deltas, c cycles round
    :math:`2 n c` sums, none larger than :math:`|W| + \sum_i D_i` and the error so far; and where PEFT rounds the delta
    to the weight's dtype to subtract it, but not to add it, each cycle leaves the rounding of each delta,
    :math:`n c` more: :math:`\gamma_{2nc} |W| + \gamma_{3nc} \sum_i D_i`.
    """
    u, times = UNIT_ROUNDOFF[weight], len(deltas) * cycles
    product = max(delta.product for delta in deltas)
    growth = gamma(3 * times, u)
    floor = 3 * times * (HALF_SMALLEST_SUBNORMAL[weight] + sum(delta.floor for delta in deltas)) * (1 + growth)
    return Allowance(product=growth * (1 + product), weight=gamma(2 * times, u), floor=floor)


def merged_allowance(delta: Allowance, *, weight: torch.dtype, roundings: int) -> Allowance:
    """Bound the error of a merged weight that is stored after `roundings` roundings to its dtype."""
    u = roundings * UNIT_ROUNDOFF[weight]
    floor = delta.floor + roundings * HALF_SMALLEST_SUBNORMAL[weight]
    return Allowance(product=delta.product + u, weight=u, floor=floor)
