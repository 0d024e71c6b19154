r"""LoKr: the Kronecker product of two small matrices, :math:`\Delta = s\,(C_1 \otimes C_2)`.

Each :math:`C_i` is in the file whole or as two factors (`decompose_both`, or a rank below half of its size), whose
product has an error of at most :math:`\gamma_K |A_i||B_i|`; that of a convolution may have a core (`typed.tucker`). An
element of the Kronecker product is one multiplication, and the scaling another: with :math:`E_i` the error of
:math:`C_i`, :math:`|\hat\Delta - \Delta| \lesssim |s| (|C_1| E_2 + E_1 |C_2| + 2 u |C_1 C_2|)`.

The shapes follow `torch.kron`: of two tensors with different numbers of dimensions the smaller one has ones in front,
but :math:`C_1` has them behind where :math:`C_2` is a kernel of a two-dimensional convolution.
"""

from __future__ import annotations

import math

import numpy as np

from consistency.numerics.typed import Typed, tucker
from consistency.stages.merged.forms.form import AddedForm
from consistency.stages.merged.forms.source import Source
from consistency.worker.model.loading import ADAPTER_NAME

_KERNEL_2D = 4
"""Dimensions of the weight of a two-dimensional convolution."""


class LoKr(AddedForm):
    """The delta of a LoKr layer, streamed by the first dimension of the Kronecker product."""

    def __init__(self, source: Source, left: Typed, right: Typed) -> None:
        dims = max(left.value.ndim, right.value.ndim)
        behind = right.value.ndim == _KERNEL_2D
        self._left = left.moved(lambda v: _with_ones(v, dims, behind=behind))
        self._right = right.moved(lambda v: _with_ones(v, dims, behind=False))
        self._scaling = source.lycoris_scaling()
        rows = self._left.value.shape[0] * self._right.value.shape[0]
        super().__init__(source.weight, rows=rows)

    @classmethod
    def of(cls, source: Source) -> LoKr | None:
        """Return the form of a layer; None where its file lacks a factor, or their product does not fit the weight."""
        left, right = _matrix(source, 1), _matrix(source, 2)
        if left is None or right is None:
            return None
        fits_weight = left.value.size * right.value.size == math.prod(source.weight.shape)
        return cls(source, left, right) if fits_weight else None

    def delta(self, rows: slice) -> Typed:
        """Return rows of the scaled Kronecker product, `(n, width)`."""
        inner = self._right.value.shape[0]
        numbers = np.arange(self.rows)[rows]
        left = self._left.moved(lambda v: _spread(v[numbers // inner], after=True))
        right = self._right.moved(lambda v: _spread(v[numbers % inner], after=False))
        product = (left * right).moved(lambda v: v.reshape(len(numbers), -1))
        return product.scaled(self._scaling)


def _matrix(source: Source, number: int) -> Typed | None:
    """Return the first or second matrix of the Kronecker product; None where a factor is not in the file."""
    if ADAPTER_NAME in getattr(source.layer, f"lokr_w{number}"):
        return source.known(f"lokr_w{number}")
    left, right = source.known(f"lokr_w{number}_a"), source.known(f"lokr_w{number}_b")
    if left is None or right is None:
        return None
    core = source.known(f"lokr_t{number}")
    if core is None:
        return left.matmul(right, source.matmul)
    kernel = core.value.shape[2:]
    flat_core = core.moved(lambda t: t.reshape(*t.shape[:2], -1))
    product = tucker(flat_core, left, right, source.matmul)
    return product.moved(lambda v: v.reshape(*v.shape[:2], *kernel))


def _with_ones(values: np.ndarray, dims: int, *, behind: bool) -> np.ndarray:
    """Return values with `dims` dimensions: dimensions of size 1 are added behind, or in front."""
    ones = (1,) * (dims - values.ndim)
    if behind:
        return values.reshape(values.shape + ones)
    return values.reshape(ones + values.shape)


def _spread(values: np.ndarray, *, after: bool) -> np.ndarray:
    """Put a dimension of size 1 after, or before, each dimension but the first, in the place of the other factor's.

    `(rows, 3, 5)` becomes `(rows, 3, 1, 5, 1)`, or `(rows, 1, 3, 1, 5)`.
    """
    shape: list[int] = []
    for size in values.shape[1:]:
        pair = (size, 1) if after else (1, size)
        shape += pair
    return values.reshape(len(values), *shape)
