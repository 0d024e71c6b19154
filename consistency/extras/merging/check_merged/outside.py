"""The elements of a tensor that an order of roundings does not explain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from consistency.extras.merging.check_merged.orders import (
    ONE_ROUNDING,
    LowRankSum,
    Order,
    RoundedProduct,
    rounded,
    stored_ends,
)
from consistency.numerics.bound import gamma
from consistency.numerics.dtype import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from consistency.numerics.precision import Precision
from consistency.numerics.same_bytes import same_memory
from consistency.numerics.typed import HALF_TYPES

BLOCK = 1 << 19
"""Elements of a block: small enough for the caches, and so large that starting its operations takes no time."""

GIVE_UP = 1 / 64
"""Part of outside elements at which an order is left for the next one: no tensor with few faults has as many."""

_MOST_AGAIN = 1 << 13
"""Elements of a block that are computed again in float64; of more than that another order is the reason."""

_GATHERED = 16
"""One of how many rows, or elements, is copied out to be computed alone: for more it takes longer than for all."""


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
    product = RoundedProduct(of, order)
    found = OutsideElements(order, torch.zeros(of.shape[0], dtype=torch.int32))
    for block in _compared(actual, of, product):
        found.seen += block.actual.numel()
        if block.differs is not None:
            _look_again(block, product, found)
            if not patient and found.share > GIVE_UP:
                return found
    return found


@dataclass(frozen=True, slots=True)
class _ComparedBlock:
    """Rows of a tensor, and which of their elements differ from one right result: None where none does."""

    rows: slice
    actual: torch.Tensor
    differs: tuple[torch.Tensor, torch.Tensor] | None


def _compared(actual: torch.Tensor, of: LowRankSum, product: RoundedProduct) -> Iterator[_ComparedBlock]:
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
    for block in _compared(actual, of, RoundedProduct(of, ONE_ROUNDING)):
        if block.differs is None:
            continue
        row, column = block.differs
        rows = row + block.rows.start
        is_few = len(row) <= _MOST_AGAIN and len(row) * _GATHERED < block.actual.numel()
        delta = of.delta_at(rows, column) if is_few else of.delta(block.rows)[row, column]
        yield block.actual[row, column], of.base[rows, column].double(), delta


def _look_again(block: _ComparedBlock, product: RoundedProduct, found: OutsideElements) -> None:
    """Count the elements of a block that are not between their ends, of those that differ from one right result."""
    assert block.differs is not None
    row, column = block.differs
    start = block.rows.start
    few = len(row) <= _MOST_AGAIN
    ends = product.ends_at(row + start, column) if few else product.ends(block.rows)[:, row, column]
    values = block.actual[row, column]
    low, high = stored_ends(ends, values.dtype)
    wrong = is_outside(values, low, high)
    if bool(wrong.any()):
        found.add((row[wrong] + start, column[wrong]), values[wrong], torch.stack((low, high))[:, wrong])


def is_outside(values: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return which values are not between their ends.

    What is not finite is judged apart (`non_finite.py`): two values that overflowed are equal, and prove nothing.
    """
    return ~((values >= low) & (values <= high)) & values.isfinite()


def blocks(rows: int, columns: int) -> Iterator[slice]:
    """Yield the rows of a matrix, block by block."""
    step = max(1, BLOCK // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Report whether two tensors are the same shape, dtype and bits."""
    alike = actual.shape == expected.shape and actual.dtype == expected.dtype
    return alike and same_memory(_bits(actual), _bits(expected))


def _bits(tensor: torch.Tensor) -> np.ndarray:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.view(width).numpy()


def half_of(actual: torch.Tensor) -> torch.dtype | None:
    """Return the half type whose numbers all elements of a float32 tensor are, None where there is none."""
    halves = (torch.bfloat16, torch.float16) if actual.dtype == torch.float32 else ()  # which has more digits
    parts = (actual[:1], actual)  # most tensors are not, which one row shows
    return next((half for half in halves if all(same_bits(one, rounded(one, half)) for one in parts)), None)


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
