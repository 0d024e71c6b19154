"""Operands in a wider dtype, without a second copy of a weight.

A fresh buffer for each widened weight costs a page fault for every page, ten times what the conversion itself takes,
and a head of 128 thousand words and 8192 features has 8 GiB in float64. So a large matrix is widened some columns at a
time, into one buffer that stays in cache, and multiplied from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.numerics import sizes

_LARGE = 1 << 16
"""Elements from which a matrix is widened into the buffer; smaller ones get memory of their own, which is reused."""

_SECOND_MATRIX = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2}
"""Products of two matrices, and where the second one is among the arguments."""

_OUT: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.addmm.default: torch.addmm,
}
"""The same products as functions with `out=`, through which BLAS writes the columns of a part to their place."""


class Widening:
    """Widen the operands of operations.

    Parameters
    ----------
    dtype : torch.dtype
        The dtype that operands are widened to.
    narrow : frozenset of torch.dtype
        The dtypes that are widened.
    """

    def __init__(self, dtype: torch.dtype, narrow: frozenset[torch.dtype]) -> None:
        self._dtype = dtype
        self._narrow = narrow
        self._buffer: torch.Tensor | None = None

    def of(self, value: Any) -> Any:
        """Return a tensor in the wider dtype if it is narrow; anything else as it is."""
        is_narrow = isinstance(value, torch.Tensor) and value.dtype in self._narrow
        return value.to(self._dtype) if is_narrow else value

    def product(self, func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Multiply by a large narrow matrix on the CPU, some columns at a time; None for any other operation.

        No inner product is split, so each element is the same sum.
        """
        position = _SECOND_MATRIX.get(func)
        if position is None:
            return None
        weight = args[position]
        is_narrow_on_host = weight.dtype in self._narrow and weight.device.type == "cpu"
        if not is_narrow_on_host or weight.numel() < _LARGE:
            return None
        *biases, left = map(self.of, args[:position])
        rows, columns = weight.shape
        # as many columns as fill the buffer
        step = max(1, sizes.PART_BYTES // (rows * self._dtype.itemsize))
        product: torch.Tensor = left.new_empty(left.shape[0], columns)
        for start in range(0, columns, step):
            part = slice(start, start + step)
            bias_parts = [_columns(bias, part, columns) for bias in biases]
            _OUT[func](*bias_parts, left, self._buffered(weight[:, part]), out=product[:, part])
        return product

    def _buffered(self, part: torch.Tensor) -> torch.Tensor:
        """Widen a matrix into the buffer, in the order in which its elements are in memory."""
        if self._buffer is None or self._buffer.numel() < part.numel():
            self._buffer = torch.empty(max(part.numel(), sizes.PART_BYTES // self._dtype.itemsize), dtype=self._dtype)
        # a weight (out, in) arrives transposed: copied column by column it would be read across its rows
        is_transposed = part.stride(0) == 1
        source = part.t() if is_transposed else part
        wide = self._buffer[: part.numel()].view(source.shape).copy_(source)
        return wide.t() if is_transposed else wide


def _columns(bias: torch.Tensor, part: slice, columns: int) -> torch.Tensor:
    """Return the part of a bias for some of `columns` columns; a bias of one column serves all of them."""
    has_every_column = bias.dim() > 0 and bias.shape[-1] == columns
    return bias[..., part] if has_every_column else bias


def each_tensor(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Replace every tensor in a value by a function's result, in lists, tuples and dictionaries of any depth.

    Operations take no other containers. torch's own `tree_map` handles any, and takes several times as long: a tenth
    of a backward pass in float64 whose every operation goes through it.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([each_tensor(function, element) for element in value])
    if type(value) is dict:
        return {name: each_tensor(function, element) for name, element in value.items()}
    return value
