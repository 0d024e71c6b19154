"""A computed tensor with its exact value and its tolerance, piece by piece: for measuring and for diagnosis."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from consistency.numerics.bound import Allowance, UserAllowance
from consistency.numerics.file_tensor import Readable, elements_of, parts_of

CHUNK = 1 << 14
"""Elements per chunk: a handful of float64 buffers of 128 KiB fit in a level-2 cache of 1 MiB."""

_BLOCK = 2 * CHUNK
"""Elements per product: at least two chunks, while it is still in cache."""

_BLAS_ROWS = 32
"""Rows per product: with fewer, BLAS spends its time on laying out the other factor (16 cost 20 %, 4 twice as much)."""

_ONE_THREAD = 1 << 18
"""Multiplications per product: OpenBLAS splits larger ones (interface/gemm.c: 4 * 65536) among threads that spin
against torch's and, on a busy machine, wait for one another: fifty times as slow was measured. In a worker it has one
thread, and a stretch is one product: between pieces threads that measure wait for the interpreter, and two of them were
little faster than one."""

_BY_ONE_THREAD = os.environ.get("OPENBLAS_NUM_THREADS") == "1"
"""Whether OpenBLAS has one thread in this process, as in a worker."""

_STRETCH = 1 << 18
"""Elements of a stretch, which one call measures, at a cost of some 30 µs: 4 MiB of exact values and magnitudes."""

_LARGEST_BLOCK = 1 << 19
"""Elements per product at most, 4 MiB of float64, for weights of any width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A stretch of a computed tensor, flat and on the CPU, with its exact value and its tolerance."""

    start: int
    """Flat index of the first element."""
    actual: torch.Tensor
    """`(n,)` of the tested dtype."""
    exact: np.ndarray
    """`(n,)` float64."""
    allowed: np.ndarray | None
    """`(n,)` float64, the tolerance of each element; None if only that of the whole tensor is known."""
    base: torch.Tensor | None = None
    """`(n,)` of any dtype: the tensor that the computation added to, if any."""


Chunks = Callable[[], Iterable[Chunk]]
"""Return the chunks of a tensor, from the first one each time it is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A stretch of a computed tensor, flat and on the CPU, with the arrays that give its exact value and tolerance."""

    start: int
    """Flat index of the first element."""
    actual: torch.Tensor
    """`(n,)` of the tested dtype."""
    value: np.ndarray
    """`(n,)` float64: the exact value, without `base`. Valid until the next stretch is drawn, as `size` is."""
    base: torch.Tensor | None = None
    """`(n,)` of any dtype, the tensor that the computation added to, if any."""
    size: np.ndarray | None = None
    """`(n,)` float64: what an `Allowance` needs, the sum of magnitudes in each element's inner product; without an
    allowance, the tolerance of each element."""
    allowance: Allowance | UserAllowance | None = None
    """The rule of the tolerance; None where `size` is the tolerance, or none is known."""

    def chunk(self, start: int, length: int) -> Chunk:
        """Return a part of the stretch with exact value and tolerance; `start` counts from the start of the stretch."""
        part = slice(start, start + length)
        exact = self.value[part]
        base = None if self.base is None else self.base[part]
        size = None if self.size is None else self.size[part]
        weight = None
        with np.errstate(all="ignore"):  # factors and weights may not be finite: their sums exceed tolerance
            if base is not None:
                weight = base.to(torch.float64).numpy()
                exact = exact + weight
            if isinstance(self.allowance, UserAllowance):
                allowed: np.ndarray | None = self.allowance.around(exact)
            elif self.allowance is not None:
                assert size is not None
                allowed = self.allowance.around(size.copy(), weight)  # a copy: `around` writes into it
            else:
                allowed = size
        return Chunk(start=self.start + start, actual=self.actual[part], exact=exact, allowed=allowed, base=base)

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks of the stretch, in order."""
        for start in range(0, len(self.value), CHUNK):
            yield self.chunk(start, CHUNK)


class LowRankProduct:
    r"""The exact value of LoRA deltas and merged weights, :math:`W + s\,(L R)` in float64, made block by block of rows.

    Parameters
    ----------
    left, right : torch.Tensor
        `(rows, rank)` and `(rank, columns)`: B and A, or the transposes of A and B where the layer stores its weight
        as (in, out).
    scaling : float
        s.
    base : torch.Tensor or None
        `(rows, columns)`, the weight before the merge; None for a delta.
    """

    def __init__(
        self, *, left: torch.Tensor, right: torch.Tensor, scaling: float, base: torch.Tensor | None = None
    ) -> None:
        self.left = left.detach().to(torch.float64).numpy() * scaling
        self.right = right.detach().to(torch.float64).numpy()
        self._left_size, self._right_size = np.abs(self.left), np.abs(self.right)
        self.base = None if base is None else base.detach()
        self.rows, self.rank, self.columns = len(self.left), *self.right.shape
        width = max(1, self.columns)
        # enough rows that BLAS is quick and a block has two chunks, few enough that a wide block has 4 MiB at most
        self._rows_per_block = max(1, min(max(_BLOCK // width, _BLAS_ROWS), _LARGEST_BLOCK // width))
        # a stretch has whole blocks
        self.rows_per_stretch = self._rows_per_block * max(1, _STRETCH // (self._rows_per_block * width))

    def stretches(self, tensors: Sequence[LowRankTensor], rows: range) -> Iterator[tuple[Stretch, ...]]:
        """Yield tuples with a stretch of every tensor; the first row of `rows` is the first of a stretch.

        Exact values are valid until the next tuple is drawn, for their memory is used again.
        """
        # the sums of magnitudes cost a second product, which a user's tolerance has no use for
        needs_sizes = any(isinstance(tested.allowance, Allowance) for tested in tensors)
        step = self.rows_per_stretch
        products = np.empty((2, min(step, len(rows)), self.columns))
        for row in rows[::step]:
            part = slice(row, min(rows.stop, row + step))
            value, size = products[:, : part.stop - row]
            self._multiply(part, value, size if needs_sizes else None)
            # once for all tensors: it copies what is not contiguous
            base = None if self.base is None else self.base[part].reshape(-1)
            yield tuple(self._stretch(tested, part, base, value, size) for tested in tensors)

    def _stretch(
        self, tested: LowRankTensor, rows: slice, base: torch.Tensor | None, value: np.ndarray, size: np.ndarray
    ) -> Stretch:
        """Return some rows of a tensor, given their base, their product and the sums of magnitudes behind it."""
        needs_size = isinstance(tested.allowance, Allowance)
        return Stretch(
            start=rows.start * self.columns,
            actual=tested.actual.detach()[rows].reshape(-1),
            value=value.reshape(-1),
            base=base if tested.has_base else None,
            size=size.reshape(-1) if needs_size else None,
            allowance=tested.allowance,
        )

    def _multiply(self, rows: slice, value: np.ndarray, size: np.ndarray | None) -> None:
        """Write some rows of the product, and if asked for the sums of magnitudes behind each element."""
        with np.errstate(all="ignore"):  # factors may not be finite: their products exceed tolerance
            step = len(value) if _BY_ONE_THREAD else self._rows_per_block
            for row in range(rows.start, rows.stop, max(1, step)):
                part = slice(row, min(rows.stop, row + step))
                target = slice(part.start - rows.start, part.stop - rows.start)
                _multiply(self.left[part], self.right, value[target])
                if size is not None:
                    _multiply(self._left_size[part], self._right_size, size[target])


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankTensor:
    """A tensor `(rows, columns)` on the CPU whose exact value is a `LowRankProduct`, with its tolerance."""

    actual: torch.Tensor
    allowance: Allowance | UserAllowance
    has_base: bool
    """Whether it is the weight after the merge, and not the delta."""


def low_rank_chunks(tested: LowRankTensor, product: LowRankProduct) -> Iterator[Chunk]:
    """Yield the chunks of a delta or of a merged weight, with exact value and tolerance."""
    for (stretch,) in product.stretches([tested], range(product.rows)):
        yield from stretch.chunks()


def _multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Multiply into `out` in pieces that OpenBLAS computes on this thread alone."""
    rows, rank = left.shape
    width = right.shape[1] if _BY_ONE_THREAD else _ONE_THREAD // max(1, rows * rank)
    for start in range(0, right.shape[1], max(1, width)):
        part = slice(start, start + max(1, width))
        np.matmul(left, right[:, part], out=out[:, part])


def exact_chunks(
    actual: Readable,
    exact: Readable,
    allowed: float | UserAllowance | torch.Tensor | None,
    *,
    base: torch.Tensor | None = None,
) -> Iterator[Chunk]:
    """Yield the chunks of a tensor, with its float64 value of the same shape, both on the CPU or in files.

    Parameters
    ----------
    allowed : float, UserAllowance, torch.Tensor or None
        The tolerance of all elements, or of each one (float64, of the same shape); None if it is not known.
    base : torch.Tensor, optional
        The tensor that the computation added to, if any.
    """
    flat_base = None if base is None else base.detach().reshape(-1)
    tolerance: np.ndarray | None
    actual_elements, exact_elements = elements_of(actual), elements_of(exact)
    for file_part in parts_of(0, math.prod(actual.shape)):
        flat, reference = actual_elements(file_part), exact_elements(file_part).numpy()
        for start in range(file_part.start, file_part.stop, CHUNK):
            part = slice(start, start + CHUNK)
            within = slice(start - file_part.start, start - file_part.start + CHUNK)
            if isinstance(allowed, UserAllowance):
                tolerance = allowed.around(reference[within])
            elif isinstance(allowed, torch.Tensor):
                tolerance = allowed.reshape(-1)[part].numpy()
            elif allowed is not None:
                tolerance = np.full(len(reference[within]), allowed)
            else:
                tolerance = None
            base_part = None if flat_base is None else flat_base[part]
            yield Chunk(start=start, actual=flat[within], exact=reference[within], allowed=tolerance, base=base_part)
