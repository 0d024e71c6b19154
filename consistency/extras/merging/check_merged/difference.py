r"""What a folder holds beside its base, without an adapter: the rank and the size of each tensor's difference.

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
"""Rows, evenly taken, that a rank is told from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How a tensor differs from the base's: `rank` is None where it is full, `share` is of the base's norm."""

    rank: int | None
    share: float

    @property
    def text(self) -> str:
        return f"{'full rank' if self.rank is None else f'rank {self.rank}'}, {self.share:.2%} of the base's norm"


def difference(actual: torch.Tensor, base: torch.Tensor) -> Difference:
    """Return how a tensor differs from another of its shape; of a stack of matrices the largest rank."""
    ranks: list[int | None] = []
    square = of_base = 0.0
    for one, before in zip(as_matrices(actual), as_matrices(base), strict=True):
        step = max(1, one.shape[0] // _MOST_ROWS)
        values = one[::step].double()
        apart = values - before[::step].double()
        square += float(apart.square().sum())
        of_base += float(before[::step].double().square().sum())
        ranks.append(_rank(apart, values, max(UNIT_ROUNDOFF.get(part.dtype, 0.0) for part in (one, before))))
    known = [rank for rank in ranks if rank is not None]
    rank = max(known, default=0) if len(known) == len(ranks) else None
    return Difference(rank=rank, share=math.sqrt(square / of_base) if of_base else math.inf)


def _rank(apart: torch.Tensor, values: torch.Tensor, unit: float) -> int | None:
    """Return the rank of a difference; None where it is full, or of a vector."""
    rows, columns = apart.shape
    size = min(_SKETCH, rows, columns)
    if size < 2:
        return None
    stream = torch.Generator().manual_seed(0)
    sketch = torch.linalg.qr(apart @ torch.randn(columns, size, generator=stream, dtype=torch.float64)).Q
    found = torch.linalg.svdvals(sketch.T @ apart)
    noise = unit * float(values.square().mean().sqrt()) / math.sqrt(3) * (math.sqrt(rows) + math.sqrt(columns))
    rank = int((found > 2 * noise).sum())
    return None if rank >= 0.8 * size else rank
