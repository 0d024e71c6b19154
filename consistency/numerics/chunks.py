"""A computed tensor with its exact value and its tolerance, in chunks: for measuring and for diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from consistency.numerics.bound import Allowance, UserAllowance

CHUNK = 1 << 14
"""Elements per chunk: a handful of float64 buffers of 128 KiB fit in a level-2 cache of 1 MiB."""

_BLOCK = 2 * CHUNK
"""Elements per product: at least two chunks, while it is still in cache."""

_BLAS_ROWS = 32
"""Rows per product: with fewer, BLAS spends its time on laying out the other factor (16 cost 20 %, 4 twice as much)."""

_ONE_THREAD = 1 << 18
"""Multiplications per product: OpenBLAS splits larger ones (interface/gemm.c: 4 * 65536) among threads that spin
against torch's and, on a busy machine, wait for one another: fifty times as slow was measured."""

_LARGEST_BLOCK = 1 << 19
"""Elements per product at most, 4 MiB of float64, for weights of any width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A stretch of a computed tensor, flat and on the CPU. Its arrays are valid until the next chunk is drawn.

    Attributes
    ----------
    start : int
        Flat index of the first element.
    actual : torch.Tensor
        `(n,)` of the tested dtype.
    exact : np.ndarray
        `(n,)` float64.
    allowed : np.ndarray or None
        `(n,)` float64, the tolerance of each element; None if only that of the whole tensor is known.
    base : torch.Tensor or None
        `(n,)` of any dtype: the tensor that the computation added to, if any.
    """

    start: int
    actual: torch.Tensor
    exact: np.ndarray
    allowed: np.ndarray | None
    base: torch.Tensor | None = None


Chunks = Callable[[], Iterable[Chunk]]
"""Return the chunks of a tensor, from the first one each time it is called."""


def low_rank_chunks(
    actual: torch.Tensor,
    *,
    left: torch.Tensor,
    right: torch.Tensor,
    scaling: float,
    base: torch.Tensor | None,
    allowance: Allowance | UserAllowance,
) -> Iterator[Chunk]:
    r"""Yield a delta or a merged weight with its exact value, :math:`W + s\,(L R)` in float64.

    Parameters
    ----------
    actual : torch.Tensor
        `(rows, columns)` on the CPU.
    left, right : torch.Tensor
        `(rows, rank)` and `(rank, columns)`: B and A, or the transposes of A and B where the layer stores its weight
        as (in, out).
    base : torch.Tensor or None
        `(rows, columns)`, the weight before the merge; None for a delta.
    """
    rows, columns = actual.shape
    scaled = left.detach().to(torch.float64).numpy() * scaling
    right64 = right.detach().to(torch.float64).numpy()
    scaled_size, right_size = np.abs(scaled), np.abs(right64)
    step = max(1, min(max(_BLOCK // max(1, columns), _BLAS_ROWS), _LARGEST_BLOCK // max(1, columns)))
    products = np.empty((2, min(step, rows), columns))
    held = np.empty(CHUNK)
    for row in range(0, rows, step):
        part = slice(row, min(rows, row + step))
        exact_rows, size_rows = products[:, : part.stop - row]
        with np.errstate(all="ignore"):  # factors may not be finite: their products exceed tolerance
            _multiply(scaled[part], right64, exact_rows)
            if isinstance(allowance, Allowance):
                _multiply(scaled_size[part], right_size, size_rows)
        exact, size, tested = exact_rows.reshape(-1), size_rows.reshape(-1), actual.detach()[part].reshape(-1)
        below = None if base is None else base.detach()[part].reshape(-1)
        for start in range(0, len(exact), CHUNK):
            chunk = slice(start, start + CHUNK)
            weight = None
            if below is not None:
                weight = held[: len(exact[chunk])]
                torch.from_numpy(weight).copy_(below[chunk])
                with np.errstate(all="ignore"):
                    exact[chunk] += weight
            allowed = _allowed(allowance, exact[chunk], size[chunk], weight)
            yield Chunk(
                start=row * columns + start,
                actual=tested[chunk],
                exact=exact[chunk],
                allowed=allowed,
                base=None if below is None else below[chunk],
            )


def _multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Multiply into `out` in pieces that OpenBLAS computes on this thread alone."""
    rows, rank = left.shape
    width = max(1, _ONE_THREAD // max(1, rows * rank))
    for start in range(0, right.shape[1], width):
        part = slice(start, start + width)
        np.matmul(left, right[:, part], out=out[:, part])


def _allowed(
    allowance: Allowance | UserAllowance, exact: np.ndarray, size: np.ndarray, weight: np.ndarray | None
) -> np.ndarray:
    """Return the tolerance of each element of a chunk, computed in place: `size` and `weight` are overwritten."""
    if isinstance(allowance, UserAllowance):
        return allowance.around(exact)
    with np.errstate(all="ignore"):  # NaN and infinities of the weight, which the tally settles
        np.multiply(size, allowance.product, out=size)
        if weight is not None:
            np.abs(weight, out=weight)
            np.multiply(weight, allowance.weight, out=weight)
            np.add(size, weight, out=size)
        np.add(size, allowance.floor, out=size)
    return size


def exact_chunks(
    actual: torch.Tensor,
    exact: torch.Tensor,
    allowed: float | UserAllowance | torch.Tensor | None,
    *,
    base: torch.Tensor | None = None,
) -> Iterator[Chunk]:
    """Yield a tensor with its float64 value of the same shape, both on the CPU.

    The tolerance is one for all elements, or one each (float64, of the same shape), or unknown. `base` is the tensor
    that the computation added to, if any.
    """
    flat, reference = actual.detach().reshape(-1), exact.detach().reshape(-1).numpy()
    below = None if base is None else base.detach().reshape(-1)
    limit: np.ndarray | None
    for start in range(0, flat.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        if isinstance(allowed, UserAllowance):
            limit = allowed.around(reference[part])
        elif isinstance(allowed, torch.Tensor):
            limit = allowed.reshape(-1)[part].numpy()
        else:
            limit = None if allowed is None else np.full(len(reference[part]), allowed)
        under = None if below is None else below[part]
        yield Chunk(start=start, actual=flat[part], exact=reference[part], allowed=limit, base=under)
