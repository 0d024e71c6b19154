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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from consistency.numerics.bound import gamma
from consistency.numerics.dtype import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF, name_of
from consistency.numerics.precision import Precision
from consistency.numerics.same_bytes import same_memory
from consistency.numerics.typed import HALF_TYPES

_BLOCK = 1 << 19
"""Elements of a block: small enough for the caches, and so large that starting its operations takes no time."""

_MOST_AGAIN = 1 << 13
"""Elements of a block that are computed again in float64; of more than that another order is the reason."""

_DEVIATIONS = 6.0
"""Standard deviations by which a mean may be off by chance."""

_GIVE_UP = 1 / 64
"""Part of outside elements at which an order is left for the next one: no tensor with few faults has as many."""

_TRIED = (8, 64)
"""Rows of a matrix, evenly taken, on which an order is tried before more of them are read."""

_SAMPLED = 16
"""Rows of a matrix, evenly taken, from which what rounding took of the adapter's effect is measured."""

_TELLING = 256
"""Elements outside of the nearest order on which others are tried first."""

_GATHERED = 16
"""One of how many rows, or elements, is copied out to be computed alone: for more it takes longer than for all."""

_FEW_COLUMNS = 32
"""Columns of a row that are compared with the base's before the whole row."""


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


class _Product:
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
        return _ends_of_sums(self.delta_ends(rows), self._base[rows], self._order)

    def delta_ends(self, rows: slice) -> torch.Tensor:
        """Return the lower and the upper ends of rows of the delta: `(2, n, columns)`, float64."""
        middle, off = self._left[rows] @ self._right, self._off[0][rows] * self._off[1] + self._floor
        return self.ends_of_deltas(torch.stack((middle - off, middle + off)), self._order)

    def ends_at(self, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Return the lower and the upper ends of single elements: `(2, n)`, float64."""
        products = self._ends_of_products(self._left[row], self._right.T[column])
        return _ends_of_sums(self.ends_of_deltas(products, self._order), self._base[row, column], self._order)

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


def _ends_of_sums(deltas: torch.Tensor, base: torch.Tensor, order: Order) -> torch.Tensor:
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
    return _Product(of, order).delta_ends


def stored_ends(ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round ends of sums to the dtype that a writer stored them in, by way of float32 or not: `(2, ...)`, float64."""
    both = torch.stack((ends.to(dtype), ends.float().to(dtype))).double()
    return torch.stack((both[:, 0].amin(dim=0), both[:, 1].amax(dim=0)))


def rounded(values: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return values rounded to a dtype, in their own dtype; as they are without one."""
    return values if dtype is None else values.to(dtype).to(values.dtype)


@dataclass(slots=True)
class OutsideElements:
    """The elements of a tensor that an order does not explain.

    Attributes
    ----------
    order : Order
        The order.
    rows : torch.Tensor
        Number of outside elements of each row, `(rows,)` int32; 0 for rows that were not looked at.
    seen : int
        Number of elements that were looked at.
    worst : tuple or None
        Row and column of an outside element, its value, and the ends between which it should be.
    places : list of tuple
        Rows and columns of the outside elements, by block.
    """

    order: Order
    rows: torch.Tensor
    seen: int = 0
    worst: tuple[int, int, float, float, float] | None = None
    places: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _far: float = -1.0

    @property
    def outside(self) -> int:
        """Return the number of outside elements."""
        return int(self.rows.sum())

    @property
    def share(self) -> float:
        """Return the outside elements over those looked at."""
        return self.outside / max(1, self.seen)

    def add(self, places: tuple[torch.Tensor, torch.Tensor], actual: torch.Tensor, ends: torch.Tensor) -> None:
        """Count outside elements, and keep the one that is farthest off in units of its size and a typical one."""
        row, column = places
        self.places.append(places)
        self.rows.index_add_(0, row, torch.ones_like(row, dtype=self.rows.dtype))
        some = slice(0, _MOST_AGAIN)
        values, (low, high) = actual[some].double(), ends[:, some].double()
        size = low.abs() + high.abs()
        # beside a typical element, so that one near zero, where the least difference is large, is not the one shown
        off = torch.maximum(low - values, values - high).nan_to_num(math.inf) / (size + size.mean() + 1e-300)
        at = int(off.argmax())
        if float(off[at]) > self._far:
            self._far = float(off[at])
            places_at = int(row[at]), int(column[at])
            self.worst = (*places_at, float(values[at]), float(low[at]), float(high[at]))


def judge(actual: torch.Tensor, of: LowRankSum, order: Order, *, patient: bool = False) -> OutsideElements:
    """Look for elements that an order does not explain; stop where they are many, unless `patient`.

    Parameters
    ----------
    actual : torch.Tensor
        `(rows, columns)`, of any float dtype, on the CPU.
    """
    product = _Product(of, order)
    found = OutsideElements(order, torch.zeros(of.shape[0], dtype=torch.int32))
    for block in _compared(actual, of, product):
        found.seen += block.actual.numel()
        if block.differs is not None:
            _look_again(block, product, found)
            if not patient and found.share > _GIVE_UP:
                return found
    return found


@dataclass(frozen=True, slots=True)
class _ComparedBlock:
    """Rows of a tensor, and which of their elements differ from one right result: None where none does."""

    rows: slice
    actual: torch.Tensor
    differs: tuple[torch.Tensor, torch.Tensor] | None


def _compared(actual: torch.Tensor, of: LowRankSum, product: _Product) -> Iterator[_ComparedBlock]:
    """Yield a tensor block by block, compared with one result that the writer may have come to."""
    memory = torch.empty(0)
    for rows in blocks(*of.shape):
        here = actual[rows]
        one = product.once(rows, memory.resize_(here.shape)).to(actual.dtype)
        differs = None
        if not same_bits(here, one):
            # NumPy finds few of many elements in a quarter of the time that torch takes
            row, column = np.divmod(np.flatnonzero(_bits(here) != _bits(one)), here.shape[1])
            differs = torch.from_numpy(row), torch.from_numpy(column)
        yield _ComparedBlock(rows, here, differs)


def unlike_one_rounding(
    actual: torch.Tensor, of: LowRankSum
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield the elements that differ from a float32 sum rounded once: they, their base and their delta, `(n,)`.

    All but the elements are float64.
    """
    for block in _compared(actual, of, _Product(of, ONE_ROUNDING)):
        if block.differs is None:
            continue
        row, column = block.differs
        rows = row + block.rows.start
        is_few = len(row) <= _MOST_AGAIN and len(row) * _GATHERED < block.actual.numel()
        delta = of.delta_at(rows, column) if is_few else of.delta(block.rows)[row, column]
        yield block.actual[row, column], of.base[rows, column].double(), delta


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Report whether two tensors are the same shape, dtype and bits."""
    alike = actual.shape == expected.shape and actual.dtype == expected.dtype
    return alike and same_memory(_bits(actual), _bits(expected))


def _bits(tensor: torch.Tensor) -> np.ndarray:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.view(width).numpy()


def _look_again(block: _ComparedBlock, product: _Product, found: OutsideElements) -> None:
    """Count the elements of a block that are not between their ends, of those that differ from one right result."""
    assert block.differs is not None
    row, column = block.differs
    start = block.rows.start
    few = len(row) <= _MOST_AGAIN
    ends = product.ends_at(row + start, column) if few else product.ends(block.rows)[:, row, column]
    values = block.actual[row, column]
    low, high = stored_ends(ends, values.dtype)
    wrong = _is_outside(values, low, high)
    if bool(wrong.any()):
        found.add((row[wrong] + start, column[wrong]), values[wrong], torch.stack((low, high))[:, wrong])


def _is_outside(values: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return which values are not between their ends.

    What is not finite is judged apart (`non_finite.py`): two values that overflowed are equal, and prove nothing.
    """
    return ~((values >= low) & (values <= high)) & values.isfinite()


def blocks(rows: int, columns: int) -> Iterator[slice]:
    """Yield the rows of a matrix, block by block."""
    step = max(1, _BLOCK // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


class MergeWriter:
    """Finds the order of a writer, which is that of all its tensors: the last one that fitted is tried first."""

    def __init__(self) -> None:
        # by whether the delta was merged a second time, which makes other orders
        self._last: dict[bool, Order] = {}
        self._nearest: dict[bool, Order] = {}

    def recent(self, actual: torch.Tensor, of: LowRankSum) -> Order:
        """Return the order that fitted last, or the plainest one."""
        known = orders(actual.dtype, of.base.dtype, of.left.dtype)
        last = self._last.get(False)
        return last if last in known else ONE_ROUNDING

    def judge(self, actual: torch.Tensor, of: LowRankSum) -> OutsideElements:
        """Judge a tensor by the order that leaves the fewest elements outside, the first one of several.

        Where no order can explain the tensor, the number of outside elements is that of some rows.
        """
        best, rows = self._search(actual, of, is_twice=False, ranks_orders=True)
        if not best.outside or rows.is_whole or best.share > _GIVE_UP:
            return best
        estimate = rows.judge(best.order)
        return estimate if estimate.share > _GIVE_UP else judge(actual, of, best.order)

    def explains(self, actual: torch.Tensor, of: LowRankSum, *, is_twice: bool = False) -> bool:
        """Report whether some order explains every element of a tensor.

        Parameters
        ----------
        is_twice : bool
            Whether the delta was merged a second time, into what the first merge had left.
        """
        if not of.scaling and not is_twice:
            return _is_cast(actual, of.base)
        best, _ = self._search(actual, of, is_twice=is_twice, ranks_orders=False)
        return not best.outside

    def _search(
        self, actual: torch.Tensor, of: LowRankSum, *, is_twice: bool, ranks_orders: bool
    ) -> tuple[OutsideElements, _Rows]:
        """Return what the best order leaves outside, and the rows that orders were tried on last.

        An order is tried on a few rows, then on more, and one that explains these on all: an element that it leaves
        outside of any of them is enough to refuse it, and one that is beyond all orders to refuse all. Then the order
        that was nearest to other tensors is as good as any. With `ranks_orders` the best one is that which leaves the
        fewest elements outside; otherwise one that explains all, or any.
        """
        tried = self._orders_to_try(actual, of, is_twice=is_twice)
        whole = replace(of, scaling=2 * of.scaling) if is_twice else of
        samples = _Rows.growing(actual, of)
        more = samples[-2] if len(samples) > 1 else samples[-1]
        best: OutsideElements | None = None
        telling: _Telling | None = None
        refused: set[Order] | None = None
        nearest = self._nearest.get(is_twice)
        for order in tried:
            is_new_tf32 = order.tf32 and order is not self._last.get(is_twice)
            if is_new_tf32 and best is not None and best.share < _least_in_tf32(actual, whole):
                continue
            if best is not None:
                # where the nearest order is known, another one is of use only where it explains all
                is_near = best.order is nearest and best.share <= _GIVE_UP
                if (is_near or not ranks_orders) and telling is not None:
                    refused = telling.refused(tried) if refused is None else refused
                    if order in refused:
                        continue
            for rows in samples:
                found = rows.judge(order)
                if found.outside:
                    break
            if order.tf32 and not found.outside and not _is_like_tf32(actual, whole, order):
                continue
            if best is None or found.share < best.share:
                best = found
                telling, refused = samples[0].telling(best) if best.outside else None, None
            if not found.outside:
                self._last[is_twice] = self._nearest[is_twice] = order
                return found, samples[-1]
            if order is tried[0] and found.share > 0 and self._is_beyond_all(samples, is_twice=is_twice):
                if nearest is None or nearest == order or nearest not in tried:
                    return found, more
                return self._outside(samples, nearest), more
        assert best is not None
        if ranks_orders:
            self._nearest[is_twice] = best.order
        return best, more

    def _outside(self, samples: list[_Rows], order: Order) -> OutsideElements:
        """Return the elements outside of an order in the first rows that have any."""
        for rows in samples:
            found = rows.judge(order)
            if found.outside:
                return found
        raise AssertionError("an element that is beyond all orders is outside of each")

    def _is_beyond_all(self, samples: list[_Rows], *, is_twice: bool) -> bool:
        """Return whether some element is beyond all orders; many of them, where no order is known to be near."""
        beyond = 0.0
        for rows in samples[:2]:
            if rows is samples[0] or rows.actual.numel() <= _BLOCK:
                beyond = max(beyond, part_beyond_all(rows.actual, rows.of_rows, is_twice=is_twice))
        return beyond > _GIVE_UP or (beyond > 0 and is_twice in self._nearest)

    def _orders_to_try(self, actual: torch.Tensor, of: LowRankSum, *, is_twice: bool) -> list[Order]:
        """Return the orders that a writer may have taken: the one that fitted last, the nearest one, all others."""
        tried = orders(actual.dtype, of.base.dtype, of.left.dtype)
        if is_twice:
            stored = dict.fromkeys((actual.dtype, of.base.dtype))
            tried = [replace(order, between=dtype) for order in tried for dtype in stored]
        first = [self._last.get(is_twice), self._nearest.get(is_twice)]
        return list(dict.fromkeys([*(order for order in first if order in tried), *tried]))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a tensor, one of each `step`, on which orders are tried."""

    actual: torch.Tensor
    of_rows: LowRankSum
    step: int

    @property
    def is_whole(self) -> bool:
        return self.step == 1

    @classmethod
    def growing(cls, actual: torch.Tensor, of: LowRankSum) -> list[_Rows]:
        """Return a few rows, more of them, and all; of a small tensor all alone."""
        samples = []
        for size in _TRIED:
            step = of.shape[0] // size
            if step > 1:
                rows = slice(None, None, step)
                samples.append(cls(actual[rows].contiguous(), of.part(rows), step))
        return [*samples, cls(actual, of, 1)]

    def telling(self, by: OutsideElements) -> _Telling | None:
        """Return elements that an order left outside; None where they were found in more rows than these."""
        if len(by.rows) != len(self.actual):
            return None
        row, column = (torch.cat(indices)[:_TELLING] for indices in zip(*by.places, strict=True))
        return _Telling(self.actual[row, column], self.of_rows.pairs(row, column))

    def judge(self, order: Order) -> OutsideElements:
        """Return the elements of these rows that an order does not explain, by the rows of the tensor."""
        found = judge(self.actual, self.of_rows, order, patient=not self.is_whole)
        if found.worst is not None:
            row, column, actual, low, high = found.worst
            found.worst = row * self.step, column, actual, low, high
        return found


@dataclass(frozen=True, slots=True)
class _Telling:
    """Elements that one order leaves outside, by which others are refused: values, and what they are sums of."""

    values: torch.Tensor
    pairs: LowRankSum

    def refused(self, candidates: Sequence[Order]) -> set[Order]:
        """Return the orders that leave some of the elements outside too.

        They have most steps in common, and starting an operation takes longer than these few elements: products are
        computed once for all orders that round the factors alike, and the sums of all orders are compared together.
        """
        products: dict[Order, tuple[_Product, torch.Tensor]] = {}
        sums = []
        for order in candidates:
            of_factors = Order(factors=order.factors, scaled=order.scaled, tf32=order.tf32)
            if of_factors not in products:
                product = _Product(self.pairs, of_factors)
                products[of_factors] = product, product.ends_of_pairs()
            product, ends = products[of_factors]
            sums.append(_ends_of_sums(product.ends_of_deltas(ends.clone(), order), self.pairs.base, order))
        low, high = stored_ends(torch.stack(sums, dim=1), self.values.dtype)
        is_refused = _is_outside(self.values, low, high).any(dim=1)
        return set(itertools.compress(candidates, is_refused.tolist()))


def _is_cast(actual: torch.Tensor, base: torch.Tensor) -> bool:
    """Report whether a tensor is the base, cast to its dtype by way of a half type or not."""
    few = slice(None, None, max(1, len(actual) // _TRIED[0]))
    return bool(_rows_of_base(actual[few], base[few]).all()) and bool(_rows_of_base(actual, base).all())


def like_base(actual: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return which rows of a matrix are the base's in some columns: `(rows,)` bool; all others are not."""
    few = slice(None, None, max(1, actual.shape[1] // _FEW_COLUMNS))
    return _rows_of_base(actual[:, few], base[:, few])


def rows_of_base(actual: torch.Tensor, base: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Return which rows of a matrix are the base's, cast to its dtype by way of a half type or not: `(rows,)` bool.

    Only `candidates`, `(rows,)` bool, are read.
    """
    rows = candidates.nonzero().reshape(-1)
    if len(rows) * _GATHERED > len(actual):
        return _rows_of_base(actual, base)
    found = torch.zeros_like(candidates)
    found[rows] = _rows_of_base(actual[rows], base[rows])
    return found


def _rows_of_base(actual: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    equal = _equal_rows(actual, base.to(actual.dtype))
    for half in HALF_TYPES:
        if half not in (actual.dtype, base.dtype) and not bool(equal.all()):
            equal |= _equal_rows(actual, base.to(half).to(actual.dtype))
    return equal


def _equal_rows(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    equal = actual == expected
    rows = equal.all(dim=1)
    if not bool(rows.all()) and not bool(actual.sum().isfinite()):
        # what is not finite is judged apart, and equals anything here
        rows = (equal | ~actual.isfinite()).all(dim=1)
    return rows


def part_beyond_all(actual: torch.Tensor, of: LowRankSum, *, is_twice: bool = False) -> float:
    r"""Return the part of the elements that no order of roundings explains.

    Each rounds the weight before by a unit roundoff where its dtype is another than that of the sum, and each sum; of
    A, B, s·B, B·A and the delta by one each of :math:`|s| \lVert B_i \rVert \lVert A_j \rVert`, and products in TF32
    by two units of its 11 bits.
    """
    base, delta = of.base.double(), of.delta(slice(None))
    once = base + delta
    sums = once.abs()
    exact = once
    if is_twice:
        exact = once + delta
        sums = sums + exact.abs()
    halves = [dtype for dtype in (actual.dtype, of.base.dtype, of.left.dtype) if dtype in HALF_TYPES]
    if actual.dtype == torch.bfloat16:
        halves.append(torch.float16)  # a sum in float16, which has fewer small numbers
    unit = max(UNIT_ROUNDOFF.get(dtype, 1.0) for dtype in (actual.dtype, *halves))
    norms = of.left.double().norm(dim=1, keepdim=True) * of.right.double().norm(dim=0) * abs(of.scaling)
    is_cast = any(half != of.base.dtype for half in halves)
    off_base = base.abs() if is_cast else 0.0
    # the last rounding is to the folder's dtype, after one to another half type or to float32
    of_sums = unit * sums * 1.01 + UNIT_ROUNDOFF.get(actual.dtype, 1.0) * exact.abs() * (1.01 if is_cast else 0.0)
    off_product = 1.01 * (Precision.TF32.product_error + gamma(of.left.shape[1] + 2, 2 * UNIT_ROUNDOFF[torch.float32]))
    allowed = of_sums + unit * off_base + (8 * unit + off_product) * norms * (2 if is_twice else 1)
    smallest = max(HALF_SMALLEST_SUBNORMAL.get(dtype, 0.0) for dtype in (actual.dtype, *halves))
    is_beyond = ~((actual.double() - exact).abs() <= allowed + 8 * smallest) & actual.isfinite()
    return float(is_beyond.double().mean())


def _least_in_tf32(actual: torch.Tensor, of: LowRankSum) -> float:
    """Return the share of elements that products in TF32 move to another value, at least.

    Its interval is wide enough to hide a wrong element, so it is considered only where as many elements are outside as
    such products move. Rounding an operand moves a product by 2⁻¹² of it in the mean, and the element to its neighbour,
    two roundings away, as often as that is a part of the distance; an eighth of that leaves room for chance.
    """
    rows = of.sample
    size = float(actual[rows].double().norm())
    moved = 2**-12 * float(of.delta(rows).norm()) / (2 * UNIT_ROUNDOFF.get(actual.dtype, 1.0) * size) if size else 0.0
    return min(moved, 1.0) / 8


def half_of(actual: torch.Tensor) -> torch.dtype | None:
    """Return the half type whose numbers all elements of a float32 tensor are, None where there is none."""
    halves = (torch.bfloat16, torch.float16) if actual.dtype == torch.float32 else ()  # which has more digits
    parts = (actual[:1], actual)  # most tensors are not, which one row shows
    return next((half for half in halves if all(same_bits(one, rounded(one, half)) for one in parts)), None)


def _is_like_tf32(actual: torch.Tensor, of: LowRankSum, order: Order) -> bool:
    r"""Report whether a tensor differs along its delta by no more than products in TF32 make: they are no other scale.

    An operand that is rounded is off by at most 2⁻¹¹ either way, so the mean of n of them by
    :math:`2^{-11} / \sqrt{3n}`: n is a third of that for normal values, whose squares are their weights, and
    `_DEVIATIONS` leaves room for it. One that is cut is smaller by 0.72 · 2⁻¹¹ in the mean, since its fraction is
    between 1 and 2, and two of them by less than 2⁻¹⁰. Base, delta and sum are rounded to the widest unit of the order.
    """
    rows = of.sample
    delta = of.delta(rows)
    square = _square(delta)
    if not square:
        return True
    exact = of.base[rows].double() + delta
    off = float(torch.dot((actual[rows].double() - exact).reshape(-1), delta.reshape(-1))) / square
    of_operands = math.sqrt(1 / of.left[rows].numel() + 1 / of.right.numel()) * 2**-11
    steps = (actual.dtype, order.product, order.delta, order.total)
    unit = max(UNIT_ROUNDOFF.get(one, 1.0) for one in steps if one is not None)
    of_sum = unit * math.sqrt((_square(exact) + square) / square / exact.numel())
    chance = _DEVIATIONS * (of_operands + of_sum) / math.sqrt(3)
    return -(2**-10) - chance <= off <= chance


@dataclass(slots=True)
class Effect:
    """The part of the adapter's effect that rounding took: sums of squares over sampled rows of all tensors.

    Attributes
    ----------
    delta : float
        Squares of the exact deltas.
    lost : float
        Squares of the errors of the folder.
    least : float
        Squares of the errors of a merge that rounds once.
    in_float32 : float
        Squares of the errors of a merge that is saved in float32.
    """

    delta: float = 0.0
    lost: float = 0.0
    least: float = 0.0
    in_float32: float = 0.0

    def add(self, actual: torch.Tensor, of: LowRankSum) -> None:
        """Add a tensor that is right."""
        delta = of.delta(of.sample)
        exact = of.base[of.sample].double() + delta
        self.delta += _square(delta)
        self.lost += _square(actual[of.sample] - exact)
        self.least += _square(exact.to(actual.dtype) - exact)
        self.in_float32 += _square(exact.float() - exact)

    def include(self, other: Effect) -> None:
        """Add the sums of other tensors."""
        for name in ("delta", "lost", "least", "in_float32"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def share(self, name: str) -> float:
        """Return an error relative to the delta, both root mean square."""
        return math.sqrt(getattr(self, name) / self.delta) if self.delta else 0.0


def _square(values: torch.Tensor) -> float:
    return float(torch.dot(values.reshape(-1), values.reshape(-1)))
