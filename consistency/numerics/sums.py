"""Sums over the ranks of a group: the exact value, and what any order of addition may be off by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from consistency.numerics.bound import gamma
from consistency.numerics.dtype import name_of
from consistency.numerics.rules import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF

_U64 = UNIT_ROUNDOFF["float64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """An exact sum, and what each element may be off by: float64 of one shape."""

    value: np.ndarray
    allowed: np.ndarray


def exact_sum(terms: torch.Tensor, *, average: bool) -> Sum:
    """Return the sum over the first dimension, or the average, in the terms' dtype in any order.

    Parameters
    ----------
    terms : torch.Tensor
        `(n, ...)` of a floating-point dtype, on the CPU.
    """
    exact = terms.to(torch.float64).numpy()
    part = 1 / len(exact) if average else 1.0
    allowed = sum_error(np.abs(exact).sum(0) * part, len(exact), name_of(terms.dtype), average=average)
    return Sum(value=exact.sum(0) * part, allowed=allowed)


def sum_error(sizes: np.ndarray, count: int, dtype: str, *, average: bool) -> np.ndarray:
    r"""Return what sums of n terms may be off by, in any order.

    It is at most :math:`\gamma_{n-1} \sum |x_i|`. Where a sum is divided by n, or its terms are multiplied by the
    rounded 1/n, two roundings more. Each rounding may be to a subnormal.

    Parameters
    ----------
    sizes : np.ndarray
        Sum of the magnitudes of each element's terms, divided by n for an average.
    """
    roundings = count + 1 if average else count - 1
    weight = gamma(roundings, UNIT_ROUNDOFF[dtype]) + gamma(count + 1, _U64)
    found: np.ndarray = weight * sizes + roundings * HALF_SMALLEST_SUBNORMAL[dtype]
    return found
