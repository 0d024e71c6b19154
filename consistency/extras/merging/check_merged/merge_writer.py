"""Find the order of roundings of a folder's writer, which explains all elements of a tensor or of none."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from consistency.extras.merging.check_merged.base_rows import is_cast
from consistency.extras.merging.check_merged.orders import (
    ONE_ROUNDING,
    LowRankSum,
    Order,
    RoundedProduct,
    ends_of_sums,
    orders,
    stored_ends,
)
from consistency.extras.merging.check_merged.outside import (
    BLOCK,
    GIVE_UP,
    OutsideElements,
    is_outside,
    judge,
    part_beyond_all,
)
from consistency.extras.merging.check_merged.tf32 import is_like_tf32, least_moved

_TRIED = (8, 64)
"""Rows of a matrix, evenly taken, on which an order is tried before more of them are read."""

_TELLING = 256
"""Elements outside of the nearest order on which others are tried first."""


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
        if not best.outside or rows.is_whole or best.share > GIVE_UP:
            return best
        estimate = rows.judge(best.order)
        return estimate if estimate.share > GIVE_UP else judge(actual, of, best.order)

    def explains(self, actual: torch.Tensor, of: LowRankSum, *, is_twice: bool = False) -> bool:
        """Report whether some order explains every element of a tensor.

        Parameters
        ----------
        is_twice : bool
            Whether the delta was merged a second time, into what the first merge had left.
        """
        if not of.scaling and not is_twice:
            return is_cast(actual, of.base)
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
        known = self._nearest.get(is_twice)
        fewest = _FewestOutside(samples[0], tried, known=known, ranks_orders=ranks_orders)
        for order in tried:
            if fewest.rules_out(order) or self._is_hidden_by_tf32(
                actual, whole, order, fewest.found, is_twice=is_twice
            ):
                continue
            found = _first_outside(samples, order)
            if order.tf32 and not found.outside and not is_like_tf32(actual, whole, order):
                continue
            fewest.consider(found)
            if not found.outside:
                self._last[is_twice] = self._nearest[is_twice] = order
                return found, samples[-1]
            if order is tried[0] and found.share > 0 and self._is_beyond_all(samples, is_twice=is_twice):
                # every order leaves elements outside: they are said of the one that is known to be near
                if known is None or known == order or known not in tried:
                    return found, more
                return _first_outside(samples, known), more
        assert fewest.found is not None
        if ranks_orders:
            self._nearest[is_twice] = fewest.found.order
        return fewest.found, more

    def _is_hidden_by_tf32(
        self, actual: torch.Tensor, of: LowRankSum, order: Order, found: OutsideElements | None, *, is_twice: bool
    ) -> bool:
        """Report whether TF32 would explain elements outside that are fewer than its products move."""
        if not order.tf32 or order is self._last.get(is_twice) or found is None:
            return False
        return found.share < least_moved(actual, of)

    def _is_beyond_all(self, samples: list[_Rows], *, is_twice: bool) -> bool:
        """Return whether some element is beyond all orders; many of them, where no order is known to be near."""
        beyond = 0.0
        for rows in samples[:2]:
            if rows is samples[0] or rows.actual.numel() <= BLOCK:
                beyond = max(beyond, part_beyond_all(rows.actual, rows.of_rows, is_twice=is_twice))
        return beyond > GIVE_UP or (beyond > 0 and is_twice in self._nearest)

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


def _first_outside(samples: Sequence[_Rows], order: Order) -> OutsideElements:
    """Return the elements outside of an order in the first rows that have any; none where no rows have."""
    for rows in samples:
        found = rows.judge(order)
        if found.outside:
            break
    return found


class _FewestOutside:
    """The fewest elements that an order leaves outside so far, by which others are ruled out.

    Parameters
    ----------
    rows : _Rows
        The rows that are tried first.
    tried : sequence of Order
        All orders that are tried.
    known : Order or None
        The order that was nearest to other tensors.
    ranks_orders : bool
        Whether the order is looked for that leaves the fewest outside, and not one that leaves none.
    """

    def __init__(self, rows: _Rows, tried: Sequence[Order], *, known: Order | None, ranks_orders: bool) -> None:
        self._rows, self._tried, self._known, self._ranks_orders = rows, tried, known, ranks_orders
        self.found: OutsideElements | None = None
        self._ruled_out: set[Order] | None = None  # by elements that the nearest order leaves outside

    def rules_out(self, order: Order) -> bool:
        """Report whether an order leaves elements outside that the nearest one leaves outside too.

        While orders are ranked, that tells enough only where the nearest one is known to be so.
        """
        if self.found is None:
            return False
        is_near = self.found.order is self._known and self.found.share <= GIVE_UP
        if self._ranks_orders and not is_near:
            return False
        if self._ruled_out is None:
            telling = self._rows.telling(self.found) if self.found.outside else None
            self._ruled_out = set() if telling is None else telling.refused(self._tried)
        return order in self._ruled_out

    def consider(self, found: OutsideElements) -> None:
        """Keep what an order leaves outside if it is less than of those before."""
        if self.found is None or found.share < self.found.share:
            self.found, self._ruled_out = found, None


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
        products: dict[Order, tuple[RoundedProduct, torch.Tensor]] = {}
        sums = []
        for order in candidates:
            of_factors = Order(factors=order.factors, scaled=order.scaled, tf32=order.tf32)
            if of_factors not in products:
                product = RoundedProduct(self.pairs, of_factors)
                products[of_factors] = product, product.ends_of_pairs()
            product, ends = products[of_factors]
            sums.append(ends_of_sums(product.ends_of_deltas(ends.clone(), order), self.pairs.base, order))
        low, high = stored_ends(torch.stack(sums, dim=1), self.values.dtype)
        is_refused = is_outside(self.values, low, high).any(dim=1)
        return set(itertools.compress(candidates, is_refused.tolist()))
