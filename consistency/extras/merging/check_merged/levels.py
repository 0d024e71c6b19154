"""Explain a tensor by values that were rounded to the levels of a few bits, before the merge or after it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.orders import LowRankSum
from consistency.extras.merging.check_merged.question import MergeQuestion
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.quantized import FP4, NF4

_CODES = 255
"""Codes of int8 with a scale alone: -127 to 127."""

_FORMATS = {
    "nf4 in blocks of 64": (NF4, 64),
    "fp4 in blocks of 64": ((*(-level for level in FP4[:0:-1]), *FP4), 64),
    "int8 by row": (tuple(code / (_CODES // 2) for code in range(-(_CODES // 2), _CODES // 2 + 1)), 0),
}
"""Levels over the largest value of a block, and the size of a block: 0 for a row."""

_MOST_OFF = 0.02
"""Relative distance of a block's scale from its largest value: scales may be quantized themselves."""

_LEAST_TELLING = 0.01
"""Part of the elements that rounding to levels moves by more than the dtype's own rounding, at least."""

_TIE = 1e-6
"""Distance from the middle of two levels, over the largest value of a block, at which either is the nearest."""

_SMALLEST = 1e-30
"""Size that divides where all values of a block are zero."""

_LEAST_VALUES = 256
"""Values of a tensor from which levels can be told."""

_FIRST, _ELEMENTS = 1 << 12, 1 << 17
"""Elements that are looked at in one go: at first, since most tensors are not on levels, and then."""

_ONE_OF = 16
"""One of how many blocks is looked at for whether levels tell anything."""


def base_levels(question: MergeQuestion) -> dict[MergeCause, str]:
    """Explain a tensor by a base that was rounded to a few bits before the merge."""
    for name, (levels, block) in _FORMATS.items():
        if all(_is_on_levels(question, levels, block, is_after=False)):
            cause = MergeCause.EIGHT_BIT_BASE if len(levels) > 16 else MergeCause.FOUR_BIT_BASE
            return {cause: name}
    return {}


def levels_after(question: MergeQuestion) -> dict[MergeCause, str]:
    """Explain a tensor by base + adapter that was rounded to a few bits after the merge."""
    for name, (levels, block) in _FORMATS.items():
        if all(_is_on_levels(question, levels, block, is_after=True)):
            return {MergeCause.ROUNDED_AFTER: f"to {name}"}
    return {}


def _is_on_levels(question: MergeQuestion, levels: tuple[float, ...], block: int, *, is_after: bool) -> Iterator[bool]:
    """Yield for some rows after the other whether they are what rounding to levels makes."""
    table = torch.tensor(levels, dtype=torch.float64)
    columns = question.base.shape[2]
    size = block or columns
    yield question.base[0].numel() % size == 0 and question.actual.numel() >= _LEAST_VALUES and size > 1
    step = math.lcm(columns, size) // columns  # the fewest rows that are whole blocks
    is_rounded = _is_rounded_after if is_after else _is_rounded_before
    target = question.target
    for matrix, low_rank_sum in question.sums(target.left, target.right, target.scaling):
        start, elements = 0, _FIRST
        while start < len(matrix):
            stop = min(len(matrix), start + step * max(1, elements // (columns * step)))
            yield is_rounded(_BlocksOfRows(matrix, low_rank_sum, slice(start, stop), size), table)
            start, elements = stop, _ELEMENTS


class _BlocksOfRows:
    """Rows of a tensor in the blocks that have one scale each: what is held, the base and the delta, `(blocks, size)`.

    They are float64; float32, which is exact enough for what half types hold.
    """

    def __init__(self, actual: torch.Tensor, of: LowRankSum, rows: slice, size: int) -> None:
        self.unit = UNIT_ROUNDOFF.get(actual.dtype, 0.0)
        self.dtype = torch.float32 if self.unit > UNIT_ROUNDOFF[torch.float32] else torch.float64
        self._base, self._left, self._right = of.base[rows], of.left[rows].to(self.dtype) * of.scaling, of.right
        self._size = size
        self.held = actual[rows].to(self.dtype).reshape(-1, size)

    def base(self) -> torch.Tensor:
        """Return the base, in memory of its own."""
        return self._base.to(self.dtype, copy=True).reshape(-1, self._size)

    def delta(self) -> torch.Tensor:
        """Return the delta."""
        return (self._left @ self._right.to(self.dtype)).reshape(-1, self._size)

    def sums(self) -> torch.Tensor:
        """Return base and delta, in memory of their own."""
        base = self._base.to(self.dtype, copy=True)
        return base.addmm_(self._left, self._right.to(self.dtype)).reshape(-1, self._size)


def _is_rounded_after(blocks: _BlocksOfRows, table: torch.Tensor) -> bool:
    """Return whether blocks are what rounding the sums of base and delta to a table of levels makes.

    The level of each sum is the nearest one, over the largest of its block; the values that are held are these levels
    by one scale, which is the largest of them, a level itself.
    """
    table, held, sums = table.to(blocks.dtype), blocks.held, blocks.sums()
    sizes = held.abs()
    scale, largest = _largest(sizes), _largest(sums.abs())
    if not _is_same_scale(scale, largest):
        return False
    few = slice(None, None, _ONE_OF)
    few_sums = sums[few].clone()
    off = _nearest(sums.div_(largest), table).mul_(scale)
    if not _is_telling(few_sums - off[few], 3 * blocks.unit * sizes[few]):
        return False
    off.sub_(held).abs_().sub_(sizes, alpha=3 * blocks.unit)
    if float(off.max()) <= 0:
        return True
    # the sum was rounded to the folder's dtype before, so that near a middle of two levels either may be its level
    row, column = (~(off <= 0)).nonzero(as_tuple=True)
    values = sums[row, column]
    slack = values.abs() * (6 * blocks.unit)
    lowest, highest = _nearest(values - slack, table), _nearest(values + slack, table)
    values_held, scale = held[row, column], scale[row, 0]
    level = _nearest(values_held / scale, table)
    is_near = (values_held - level * scale).abs() <= 3 * blocks.unit * values_held.abs()
    return bool(((lowest <= level) & (level <= highest) & is_near).all())


def _is_rounded_before(blocks: _BlocksOfRows, table: torch.Tensor) -> bool:
    """Return whether blocks are what adding the delta to the base's values makes, rounded to a table of levels.

    The level of each value of the base is the nearest one, over the largest of its block; what is held without the
    delta are these levels by one scale, which is that largest value but for its own rounding.
    """
    table, base, delta = table.to(blocks.dtype), blocks.base(), blocks.delta()
    held = blocks.held - delta
    largest = _largest(base.abs())
    # half way between two levels, where quantizers differ, the one that fits is taken
    low, high = (_nearest(base / largest + shift, table) for shift in (-_TIE, _TIE))
    sure = torch.where(low == high, low, 0.0)
    scale = (held * sure).sum(dim=1, keepdim=True) / sure.square().sum(dim=1, keepdim=True).clamp(min=_SMALLEST)
    if not _is_same_scale(scale, largest):
        return False
    is_low = (held - low * scale).abs() <= (held - high * scale).abs()
    rounded = torch.where(is_low, low, high) * scale
    allowed = 3 * blocks.unit * (blocks.held.abs() + delta.abs() + rounded.abs())
    return _is_telling(base - rounded, allowed) and float((held - rounded).abs_().sub_(allowed).max()) <= 0


def _largest(sizes: torch.Tensor) -> torch.Tensor:
    """Return the largest size of each block, `(blocks, 1)`."""
    return sizes.amax(dim=1, keepdim=True).clamp_(min=_SMALLEST)


def _is_same_scale(scale: torch.Tensor, largest: torch.Tensor) -> bool:
    return bool(((scale / largest - 1).abs() <= _MOST_OFF).all())


def _is_telling(moved: torch.Tensor, allowed: torch.Tensor) -> bool:
    """Return whether levels move values by more than what is allowed for the dtype's own rounding.

    Levels that are no farther apart than the dtype's own numbers tell nothing.
    """
    telling = int((moved.abs() > allowed).count_nonzero())
    return telling >= _LEAST_TELLING * moved.numel()


def _nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the nearest level of each value."""
    if len(table) == _CODES:  # these are evenly spaced
        largest = _CODES // 2
        return (values * largest).round_().clamp_(-largest, largest).div_(largest)
    return table[torch.bucketize(values, (table[1:] + table[:-1]) / 2)]
