r"""The orders in which writers of merged weights round, and the elements of a tensor that an order does not explain.

A merge is :math:`M = W + s\,B A`. Every writer computes it in some order of steps, and rounds after some of them: PEFT
rounds the delta to the adapter's dtype and the sum to the weight's, a safe merge rounds the delta to the weight's,
Unsloth sums in float32 and rounds once, torchtune and MLX round :math:`s B` first, others cast A and B. What a writer
rounds is known exactly but for one step, the product of rank K, whose error depends on the order of its sums: with
:math:`\gamma_n = n u / (1 - n u)` and :math:`u = 2^{-24}` it is at most (`consistency.numerics.bound`)

.. math:: \gamma_{K+2}\,(|B||A|)_{ij} \le \gamma_{K+2}\,\lVert B_i \rVert \lVert A_j \rVert = e_{ij}

(Cauchy and Schwarz; in TF32 :math:`2t + t^2`, :math:`t = 2^{-10}`, more). Scaling, adding the known number
:math:`W_{ij}` and rounding to nearest never change which of two numbers is the larger. So the ends of
:math:`[(BA)_{ij} - e_{ij}, (BA)_{ij} + e_{ij}]` are taken through the writer's own steps, and an element is right if it
lies between what comes out: no allowance is guessed, and where rounding is certain only one value is right.

A float32 product of one's own, taken through the same steps, is a result that the writer may have come to as well;
where the delta is not rounded it is added to the weight by the same operation, `addmm`, as Unsloth has it. What equals
it to the bit is right; only the other elements, few where the order is the writer's, are computed in float64 with their
ends, where the sum may have been rounded to float32 on the way or not.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from consistency.numerics.bound import gamma
from consistency.numerics.dtype import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF, name_of
from consistency.numerics.precision import Precision
from consistency.numerics.typed import HALF_TYPES

_SAMPLED = 16
"""Rows of a matrix, evenly taken, from which what rounding took of the adapter's effect is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The dtypes to which a writer rounds after each step; None where it does not round.

    Attributes
    ----------
    factors : torch.dtype or None
        Dtype of A and B, before they are multiplied.
    scaled : torch.dtype or None
        Dtype of s·B, where the scaling is multiplied into it.
    product, delta : torch.dtype or None
        Dtypes of B·A, and of s·B·A.
    total : torch.dtype or None
        Dtype of the weight before, and of the sum.
    tf32 : bool
        Whether the product runs in TF32.
    between : torch.dtype or None
        Dtype of the sum of a first merge, to which a delta is added once more; None where there was one merge.
    change : torch.dtype or None
        Dtype of the difference between sum and weight, which is what a writer adds to the weight in the end, as of a
        merged model; None where the sum itself is taken.
    """

    factors: torch.dtype | None = None
    scaled: torch.dtype | None = None
    product: torch.dtype | None = None
    delta: torch.dtype | None = None
    total: torch.dtype | None = None
    tf32: bool = False
    between: torch.dtype | None = None
    change: torch.dtype | None = None

    @property
    def roundings(self) -> int:
        """Return the number of steps that round, but for the last one."""
        return sum(dtype is not None for dtype in (self.factors, self.scaled, self.product, self.delta, self.total))

    @property
    def text(self) -> str:
        """Return the order in words."""
        named = {"A and B": self.factors, "s·B": self.scaled, "B·A": self.product, "the delta": self.delta}
        parts = [f"{step} in {name_of(dtype)}" for step, dtype in {**named, "the sum": self.total}.items() if dtype]
        if self.tf32:
            parts.append("products in TF32")
        if self.change is not None:
            parts.append(f"the difference from the weight in {name_of(self.change)}, added again")
        if self.between is not None:
            parts.append(f"one adapter after the other, the sum in {name_of(self.between)} between them")
        return ", ".join(parts) or "one rounding"


ONE_ROUNDING = Order()


@functools.cache
def orders(stored: torch.dtype, base: torch.dtype, adapter: torch.dtype) -> list[Order]:
    """Return the orders that writers take, those that round least first."""
    halves = list(dict.fromkeys(one for one in (base, stored, adapter) if one in HALF_TYPES))
    found = [ONE_ROUNDING]
    for half, factors, total in itertools.product(halves, (False, True), (None, *halves)):
        first = half if factors else None
        found += [
            Order(factors=first, total=total),
            Order(factors=first, delta=half, total=total),
            Order(factors=first, product=half, delta=half, total=total),
            Order(factors=first, scaled=half, total=total),
            Order(factors=first, scaled=half, delta=half, total=total),
        ]
    found.sort(key=lambda one: one.roundings)
    # What fits less often is tried later: a difference that is added again (mergekit), and a sum in another half type.
    plain = [one for one in found if not one.factors and not one.scaled]
    found += [replace(one, change=half) for half in halves for one in plain if one.total in (None, half)]
    if stored == torch.bfloat16 and torch.float16 not in halves:
        half = torch.float16
        found += [replace(one, total=half) for one in plain if one.total is None]
        found += [Order(delta=half, total=half), Order(product=half, delta=half, total=half)]
        found += [Order(factors=half, product=half, delta=half, total=half)]
    found += [replace(one, tf32=True) for one in plain]
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class LowRankSum:
    """W + s·L·R in any precision: `(rows, columns)` from `(rows, K)` and `(K, columns)`."""

    base: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    scaling: float

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.left.shape[0]), int(self.right.shape[1])

    @property
    def sample(self) -> slice:
        """Return rows that are evenly taken, `_SAMPLED` of them or more."""
        return slice(None, None, max(1, self.shape[0] // _SAMPLED))

    def part(self, rows: slice | torch.Tensor) -> LowRankSum:
        """Return the sum of some rows."""
        return LowRankSum(self.base[rows].contiguous(), self.left[rows].contiguous(), self.right, self.scaling)

    def pairs(self, row: torch.Tensor, column: torch.Tensor) -> LowRankSum:
        """Return single elements: their base, `(n,)`, their rows of L and, beside each, its column of R."""
        return LowRankSum(self.base[row, column], self.left[row], self.right[:, column], self.scaling)

    def delta(self, rows: slice) -> torch.Tensor:
        """Return rows of the exact delta, float64."""
        return (self.left[rows].double() @ self.right.double()).mul_(self.scaling)

    def delta_at(self, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Return single elements of the exact delta, float64, `(n,)`."""
        return (self.left[row].double() * self.right.T[column].double()).sum(dim=1).mul_(self.scaling)

    def delta_square(self) -> float:
        """Return the sum of the squares of the delta, which is that of the products of two small matrices."""
        left, right = self.left.double(), self.right.double()
        return self.scaling**2 * float(((left.T @ left) * (right @ right.T)).sum())


class RoundedProduct:
    """The factors of a sum as an order rounds them, and the ends between which the sum's elements lie."""

    def __init__(self, of: LowRankSum, order: Order) -> None:
        rank = max(1, of.left.shape[1])
        left, right = (rounded(one.double(), order.factors) for one in (of.left, of.right))
        self._scaling = abs(of.scaling)
        left = left * math.copysign(1.0, of.scaling)  # so that scaling keeps the ends in order
        if order.scaled is not None:
            left, self._scaling = rounded(left * self._scaling, order.scaled), 1.0
        u = UNIT_ROUNDOFF[torch.float32]
        share = gamma(rank + 2, 2 * u if order.tf32 else u) + (Precision.TF32.product_error if order.tf32 else 0.0)
        self._order, self._base, self._left, self._right, self._share = order, of.base, left, right, share
        self._floor = HALF_SMALLEST_SUBNORMAL[torch.float32] * (rank + 2)

    @functools.cached_property
    def _in_float32(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both factors in float32; where nothing is rounded before the scaling, it is multiplied into one."""
        scaling = self._scaling if self._order.product is None else 1.0
        return (self._left * scaling).float(), self._right.float()

    @functools.cached_property
    def _off(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bound of the product's error: that of an element is the product of its row's and its column's."""
        return self._left.norm(dim=1, keepdim=True) * self._share, self._right.norm(dim=0, keepdim=True)

    def once(self, rows: slice, out: torch.Tensor) -> torch.Tensor:
        """Return one result that the writer may have come to, float32, in the memory of `out`."""
        order, base = self._order, self._base[rows]
        if order.total not in (None, base.dtype):
            base = rounded(base.float(), order.total)
        merged = self._added_once(rows, base, out)
        if order.change is not None:
            return rounded(rounded(merged - base, order.change) + base, order.total)
        if order.between is not None:
            merged = self._added_once(rows, merged.to(order.between, copy=True), out)
        return merged

    def _added_once(self, rows: slice, base: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return one result of adding the delta to `base`, float32, in the memory of `out`."""
        left, right = self._in_float32
        order = self._order
        if order.product is None and order.delta is None:
            return rounded(out.copy_(base).addmm_(left[rows], right), order.total)
        values = torch.mm(left[rows], right, out=out)
        if order.product is not None:
            values = rounded(values, order.product).mul_(self._scaling)
        return rounded(rounded(values, order.delta).add_(base), order.total)

    def ends(self, rows: slice) -> torch.Tensor:
        """Return the lower and the upper ends of rows of the sum: `(2, n, columns)`, float64."""
        return ends_of_sums(self.delta_ends(rows), self._base[rows], self._order)

    def delta_ends(self, rows: slice) -> torch.Tensor:
        """Return the lower and the upper ends of rows of the delta: `(2, n, columns)`, float64."""
        middle, off = self._left[rows] @ self._right, self._off[0][rows] * self._off[1] + self._floor
        return self.ends_of_deltas(torch.stack((middle - off, middle + off)), self._order)

    def ends_at(self, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Return the lower and the upper ends of single elements: `(2, n)`, float64."""
        products = self._ends_of_products(self._left[row], self._right.T[column])
        return ends_of_sums(self.ends_of_deltas(products, self._order), self._base[row, column], self._order)

    def ends_of_pairs(self) -> torch.Tensor:
        """Return the ends of products, each of a row of L and the column of R beside it: `(2, n)`, float64."""
        return self._ends_of_products(self._left, self._right.T)

    def _ends_of_products(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return the ends of the products of rows of two matrices."""
        middle = (left * right).sum(dim=1)
        off = left.norm(dim=1) * self._share * right.norm(dim=1) + self._floor
        return torch.stack((middle - off, middle + off))

    def ends_of_deltas(self, products: torch.Tensor, order: Order) -> torch.Tensor:
        """Return the ends of deltas from those of their products, in whose memory they may be.

        `order` rounds the factors as this product's does, which may be another one.
        """
        return rounded(rounded(products, order.product).mul_(self._scaling), order.delta)


def ends_of_sums(deltas: torch.Tensor, base: torch.Tensor, order: Order) -> torch.Tensor:
    """Return the ends of sums, float64, from those of their deltas, in whose memory they may be."""
    base = rounded(base.double(), order.total)
    if order.change is not None:
        sums = rounded(deltas.add_(base), order.total)
        return rounded(rounded(sums - base, order.change).add_(base), order.total)
    if order.between is None:
        return rounded(deltas.add_(base), order.total)
    # what one merge left is the base of the other; both have the same delta, so that ends stay ends
    return rounded(deltas + stored_ends(rounded(deltas + base, order.total), order.between), order.total)


def delta_ends(of: LowRankSum, order: Order) -> Callable[[slice], torch.Tensor]:
    """Return what gives the ends of some rows of a delta, as an order rounds it: `(2, n, columns)`, float64."""
    return RoundedProduct(of, order).delta_ends


def stored_ends(ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round ends of sums to the dtype that a writer stored them in, by way of float32 or not: `(2, ...)`, float64."""
    both = torch.stack((ends.to(dtype), ends.float().to(dtype))).double()
    return torch.stack((both[:, 0].amin(dim=0), both[:, 1].amax(dim=0)))


def rounded(values: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return values rounded to a dtype, in their own dtype; as they are without one."""
    return values if dtype is None else values.to(dtype).to(values.dtype)


def square_of(values: torch.Tensor) -> float:
    """Return the sum of the squares of a tensor."""
    return float(torch.dot(values.reshape(-1), values.reshape(-1)))
