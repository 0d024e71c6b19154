"""Measure deltas and merged weights against the product of two factors, which the compiled kernel makes as it goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from consistency.numerics.chunks import CHUNK, LowRankProduct, LowRankTensor
from consistency.numerics.dtype import name_of
from consistency.numerics.kernels.compiled import Kernel, Product
from consistency.numerics.kernels.compiled_error import computed, fits_in, tally_of
from consistency.numerics.kernels.numpy_error import errors_by_numpy
from consistency.numerics.kernels.tally import ErrorTally

_LARGEST_RANK = 32
"""The kernel saves writing the product and reading it, but BLAS multiplies faster, with fused operations and blocks of
both factors. For three tensors of 2048 x 5632 and two threads (AVX-512), nanoseconds per element and thread by kernel
and by BLAS: 5.6 and 10.6 for rank 8, 7.1 and 8.6 for 16, 11.6 and 11.5 for 32, 24.8 and 12.3 for 64."""


class CompiledProduct:
    """Tensors that are to be a product; NumPy measures the chunks in which something is not finite.

    Attributes
    ----------
    rows_per_tile : int
        Rows that are made at once. Measured in parts that begin with a tile, tensors have the same sums.
    """

    def __init__(
        self, kernel: Kernel, tensors: Sequence[LowRankTensor], product: LowRankProduct, *, chunk: int = CHUNK
    ) -> None:
        # `chunk` is how many elements share a sum
        self._kernel = kernel
        self._tensors = tensors
        self._product = product
        self._chunk = chunk
        self._left, self._right = np.ascontiguousarray(product.left), np.ascontiguousarray(product.right)
        self.rows_per_tile = max(1, chunk // product.columns)

    def measure(self, rows: range) -> list[ErrorTally]:
        """Measure some rows of each tensor."""
        base = self._product.base
        tensors = [one.actual.detach() for one in self._tensors]
        of = [
            computed(actual, base if one.has_base else None, one.allowance, has_size=True)
            for actual, one in zip(tensors, self._tensors, strict=True)
        ]
        product = Product(
            left=self._left.ctypes.data,
            right=self._right.ctypes.data,
            rank=self._left.shape[1],
            columns=self._product.columns,
            rows_per_tile=self.rows_per_tile,
        )
        kinds = [name_of(actual.dtype) for actual in tensors]
        seen, sums, left_out = self._kernel.low_rank(kinds, product, of, rows=rows, chunk=self._chunk)
        found = [tally_of(one, [sums[:, i]], has_ratio=True) for i, one in enumerate(seen)]
        for tally, left, tested in zip(found, left_out, self._tensors, strict=True):
            for tally_of_chunk in self._by_numpy(tested, rows, np.flatnonzero(left).tolist()):
                tally.include(tally_of_chunk)
        return found

    def _by_numpy(self, tested: LowRankTensor, rows: range, chunks: Sequence[int]) -> Iterator[ErrorTally]:
        per_tile = -(-self.rows_per_tile * self._product.columns // self._chunk)
        for number in chunks:
            tile, place = divmod(number, per_tile)
            first = rows.start + tile * self.rows_per_tile
            of_tile = range(first, min(rows.stop, first + self.rows_per_tile))
            ((stretch,),) = self._product.stretches([tested], of_tile)
            yield errors_by_numpy(stretch.chunk(place * self._chunk, self._chunk))


def is_measurable(tensors: Sequence[LowRankTensor], product: LowRankProduct) -> bool:
    """Report whether the kernel can measure tensors, and no other way is faster."""
    readable = all(fits_in(one.actual, product.base if one.has_base else None) for one in tensors)
    return readable and 0 < product.rank <= _LARGEST_RANK and product.columns > 0
