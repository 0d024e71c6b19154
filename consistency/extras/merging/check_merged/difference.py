r"""Measure how a folder differs from its base, without an adapter: the rank and the size of each difference.

A difference of rank K that was added and rounded is a matrix of rank K and noise. Rounding moves an element by at most
a unit roundoff, evenly spread, so its standard deviation is :math:`\sigma = u\,\mathrm{rms}(M) / \sqrt 3`, and the
largest singular value of such noise is near :math:`\sigma(\sqrt m + \sqrt n)` for an (m, n) matrix (Bai and Yin).
Singular values of twice that are the difference's own. They are found in a random sketch of the matrix, whose
size bounds the rank that is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from consistency.extras.merging.check_merged.folder import as_matrices
from consistency.numerics.dtype import UNIT_ROUNDOFF

_SKETCH = 160
"""Columns of the sketch: ranks up to 128 and what the noise adds; larger ones are called full."""

_MOST_ROWS = 4096
"""Rows, evenly taken, from which a rank is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of a tensor from the base's: `rank` is None where it is full, `share` is of the base's norm."""

    rank: int | None
    share: float

    @property
    def text(self) -> str:
        """Return rank and size in words."""
        rank = "full rank" if self.rank is None else f"rank {self.rank}"
        return f"{rank}, {self.share:.2%} of the base's norm"


def difference(actual: torch.Tensor, base: torch.Tensor) -> Difference:
    """Return the difference of a tensor from another of its shape; a stack of matrices has the largest rank."""
    ranks: list[int | None] = []
    square = base_square = 0.0
    unit = max(UNIT_ROUNDOFF.get(tensor.dtype, 0.0) for tensor in (actual, base))
    for matrix, before in zip(as_matrices(actual), as_matrices(base), strict=True):
        step = max(1, matrix.shape[0] // _MOST_ROWS)
        values = matrix[::step].double()
        change = values - before[::step].double()
        square += float(change.square().sum())
        base_square += float(before[::step].double().square().sum())
        ranks.append(_rank(change, values, unit))
    low_ranks = [rank for rank in ranks if rank is not None]
    rank = max(low_ranks, default=0) if len(low_ranks) == len(ranks) else None
    return Difference(rank=rank, share=math.sqrt(square / base_square) if base_square else math.inf)


def _rank(change: torch.Tensor, values: torch.Tensor, unit: float) -> int | None:
    """Return the rank of a matrix `change` of values with this unit roundoff; None where it is full, or of a vector."""
    rows, columns = change.shape
    size = min(_SKETCH, rows, columns)
    if size < 2:
        return None
    stream = torch.Generator().manual_seed(0)
    sketch = torch.linalg.qr(change @ torch.randn(columns, size, generator=stream, dtype=torch.float64)).Q
    singular_values = torch.linalg.svdvals(sketch.T @ change)
    rank = int((singular_values > 2 * noise_norm(values, unit)).sum())
    return None if rank >= 0.8 * size else rank


def noise_norm(values: torch.Tensor, unit: float) -> float:
    """Return the largest singular value that rounding a matrix of these values leaves, about."""
    rows, columns = values.shape
    return unit * float(values.square().mean().sqrt()) / math.sqrt(3) * (math.sqrt(rows) + math.sqrt(columns))
