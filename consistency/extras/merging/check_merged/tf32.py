"""What products in TF32 do to a tensor: by their size and direction they are told from mistakes."""

from __future__ import annotations

import math

import torch

from consistency.extras.merging.check_merged.orders import LowRankSum, Order, square_of
from consistency.numerics.dtype import UNIT_ROUNDOFF

_DEVIATIONS = 6.0
"""Standard deviations by which a mean may be off by chance."""


def least_moved(actual: torch.Tensor, of: LowRankSum) -> float:
    """Return the share of elements that products in TF32 move to another value, at least.

    Its interval is wide enough to hide a wrong element, so it is considered only where as many elements are outside as
    such products move. Rounding an operand moves a product by 2⁻¹² of it in the mean, and the element to its neighbour,
    two roundings away, as often as that is a part of the distance; an eighth of that leaves room for chance.
    """
    rows = of.sample
    size = float(actual[rows].double().norm())
    moved = 2**-12 * float(of.delta(rows).norm()) / (2 * UNIT_ROUNDOFF.get(actual.dtype, 1.0) * size) if size else 0.0
    return min(moved, 1.0) / 8


def is_like_tf32(actual: torch.Tensor, of: LowRankSum, order: Order) -> bool:
    r"""Report whether a tensor differs along its delta by no more than products in TF32 make: they are no other scale.

    An operand that is rounded is off by at most 2⁻¹¹ either way, so the mean of n of them by
    :math:`2^{-11} / \sqrt{3n}`: n is a third of that for normal values, whose squares are their weights, and
    `_DEVIATIONS` leaves room for it. One that is cut is smaller by 0.72 · 2⁻¹¹ in the mean, since its fraction is
    between 1 and 2, and two of them by less than 2⁻¹⁰. Base, delta and sum are rounded to the widest unit of the order.
    """
    rows = of.sample
    delta = of.delta(rows)
    square = square_of(delta)
    if not square:
        return True
    exact = of.base[rows].double() + delta
    off = float(torch.dot((actual[rows].double() - exact).reshape(-1), delta.reshape(-1))) / square
    of_operands = math.sqrt(1 / of.left[rows].numel() + 1 / of.right.numel()) * 2**-11
    steps = (actual.dtype, order.product, order.delta, order.total)
    unit = max(UNIT_ROUNDOFF.get(one, 1.0) for one in steps if one is not None)
    of_sum = unit * math.sqrt((square_of(exact) + square) / square / exact.numel())
    chance = _DEVIATIONS * (of_operands + of_sum) / math.sqrt(3)
    return -(2**-10) - chance <= off <= chance
