"""Explain a tensor by values that were rounded to the levels of a few bits, before the merge or after it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.orders import LowRankSum
from consistency.extras.merging.check_merged.question import MergeQuestion
from consistency.numerics.dtype import UNIT_ROUNDOFF

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Levels of bitsandbytes' nf4, as its source has them; its blocks have 64 values."""

_FP4 = (0.0, 0.0052083333, 0.16666667, 0.25, 0.33333333, 0.5, 0.66666667, 1.0)
"""Levels of bitsandbytes' fp4 without their signs, as its source has them."""

_CODES = 255
"""Codes of int8 with a scale alone: -127 to 127."""

_FORMATS = {
    "nf4 in blocks of 64": (_NF4, 64),
    "fp4 in blocks of 64": ((*(-level for level in _FP4[:0:-1]), *_FP4), 64),
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

_ROWS = 512
"""Blocks of 64 values that are looked at in one go."""


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
    rows = math.lcm(columns, size) // columns  # the fewest rows that are whole blocks
    rows *= max(1, 64 * _ROWS // (columns * rows))
    target = question.target
    for matrix, low_rank_sum in question.sums(target.left, target.right, target.scaling):
        for start in range(0, len(matrix), rows):
            part = slice(start, min(len(matrix), start + rows))
            yield _is_rounded(matrix[part], low_rank_sum, part, table, size, is_after=is_after)


def _is_rounded(
    actual: torch.Tensor, of: LowRankSum, rows: slice, table: torch.Tensor, size: int, *, is_after: bool
) -> bool:
    """Return whether rows are what rounding their blocks to a table of levels makes, before the merge or after it.

    The level of each value is the nearest one, over the largest of its block; the values of a block are these levels
    by one scale, which is that largest value but for its own rounding.
    """
    unit = UNIT_ROUNDOFF.get(actual.dtype, 0.0)
    # float32 is exact enough for what half types hold
    dtype = torch.float32 if unit > UNIT_ROUNDOFF[torch.float32] else torch.float64
    table, values, actual = table.to(dtype), of.base[rows].to(dtype), actual.to(dtype)
    delta = (of.left[rows].to(dtype) @ of.right.to(dtype)).mul_(of.scaling)
    if is_after:
        exact, held = values + delta, actual
    else:
        exact, held = values, actual - delta
    exact, held = exact.reshape(-1, size), held.reshape(-1, size)
    largest = exact.abs().amax(dim=1, keepdim=True).clamp(min=_SMALLEST)
    if is_after:
        # the largest value that is held is a level itself
        scale = held.abs().amax(dim=1, keepdim=True).clamp(min=_SMALLEST)
        level = _nearest(held / scale, table)
        # the sum was rounded to the folder's dtype before, so that near a middle both its neighbours are right
        values = exact / largest
        slack = values.abs().mul_(6 * unit)
        lowest, highest = _nearest(values - slack, table), _nearest(values.add_(slack), table)
        # the largest distance takes a fifth of the time of comparing all, and is NaN where one of them is
        if not float(torch.maximum(lowest.sub_(level), level - highest).max()) <= 0:
            return False
        allowed = held.abs().mul_(3 * unit)
    else:
        # half way between two levels, where quantizers differ, the one that fits is taken
        low, high = (_nearest(exact / largest + shift, table) for shift in (-_TIE, _TIE))
        sure = torch.where(low == high, low, 0.0)
        scale = (held * sure).sum(dim=1, keepdim=True) / sure.square().sum(dim=1, keepdim=True).clamp(min=_SMALLEST)
        is_low = (held - low * scale).abs() <= (held - high * scale).abs()
        level = torch.where(is_low, low, high)
        sizes = (actual.abs() + delta.abs()).reshape(-1, size) + (level * scale).abs()
        allowed = 3 * unit * sizes
    if not bool(((scale / largest - 1).abs() <= _MOST_OFF).all()):
        return False
    rounded = level * scale
    # levels that are no farther apart than the dtype's own numbers tell nothing
    telling = int(((exact - rounded).abs_() > allowed).count_nonzero())
    return telling >= _LEAST_TELLING * exact.numel() and float((held - rounded).abs_().sub_(allowed).max()) <= 0


def _nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the nearest level of each value."""
    if len(table) == _CODES:  # these are evenly spaced
        largest = _CODES // 2
        return (values * largest).round_().clamp_(-largest, largest).div_(largest)
    return table[torch.bucketize(values, (table[1:] + table[:-1]) / 2)]
