r"""What `svd` and the other `_svd` types make of deltas: singular values and vectors, however close the values are.

PEFT combines the deltas to D, takes its singular value decomposition on the device, and keeps the largest r:
:math:`B = U_r \Sigma_r` and :math:`A = V_r^T`. Vectors have no signs of their own, and where singular values are close,
no directions either; the product B A is as undetermined where the cut falls between two close ones. What is determined
whatever lies close together, with :math:`b_k`, :math:`a_k` the columns and rows of the factors and
:math:`s_k = |b_k|`:

* the singular values: :math:`|s_k - \sigma_k(D)| \le \eta` (Weyl), so that the largest are those that were kept;
* that each pair of vectors is one of D: :math:`|D a_k - b_k| \le \eta` and :math:`|D^T b_k / s_k - s_k a_k| \le \eta`;
* that the rows of A are orthonormal.

Together these leave nothing else open: B A is the projection of D on the rows of A, and no other rank-r matrix is
nearer to D by more than :math:`\eta` (Eckart, Young).

The allowance :math:`\eta` has two parts. D itself is computed: the bounds of its elements, as one norm. The
decomposition is that of a matrix which is off by :math:`p\,u\,\sigma_1`, and each set of vectors is off by
:math:`p\,u` from an orthonormal one, with :math:`p(m, n) = 10 \max(m, n)` (*LAPACK Users' Guide*, 3rd ed., sections 4.3
and 4.9.1): :math:`3 p u \sigma_1` in all. MKL stays below a hundredth of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from consistency.extras.peft_api.adapters.chance import rescaled
from consistency.extras.peft_api.adapters.layer_factors import LayerFactors
from consistency.extras.peft_api.adapters.pruned import DENSITY, added, elected
from consistency.numerics.bound import gamma
from consistency.numerics.running_error import Arithmetic, Tracked

TRUNCATED = ("svd", "ties_svd", "magnitude_prune_svd", "dare_linear_svd", "dare_ties_svd")

_GROWTH = 10
"""How errors of a decomposition grow with its size, by the LAPACK Users' Guide; see above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a device computed, what it has to be near, and how near it is."""

    exact_a: torch.Tensor
    exact_b: torch.Tensor
    """`exact_a`, `exact_b`: Float64: each factor as the other one and D determine it."""
    allowed_a: torch.Tensor
    allowed_b: torch.Tensor
    """`allowed_a`, `allowed_b`: of each element, if the error were spread over the vector evenly: a vector outside has
    an element outside."""
    share_a: float
    share_b: float
    share_values: float
    share_orthonormal: float
    """`share_a`, `share_b`, `share_values`, `share_orthonormal`: error over allowance: of the worst vector, of the
    worst singular value, and of the products of rows."""
    values: list[float]
    exact_values: list[float]
    """`values`, `exact_values`: singular values; of the exact ones, one more than the device kept."""
    is_cut_sure: bool
    """Whether the gap at the cut is wide enough to determine the product."""


def combined_delta(kind: str, by: Arithmetic, factors: LayerFactors, masks: Sequence[np.ndarray] = ()) -> Tracked:
    """Return the combination of deltas before it is cut, as a matrix (out, in)."""
    deltas = [
        _delta(by, b.reshape(len(b), -1), a.reshape(len(a), -1), scaling)
        for a, b, scaling in zip(factors.a, factors.b, factors.scalings, strict=True)
    ]
    if kind in ("ties_svd", "magnitude_prune_svd"):
        deltas = [_largest(delta) for delta in deltas]
    elif masks:
        deltas = [rescaled(delta, mask, DENSITY) for delta, mask in zip(deltas, masks, strict=True)]
    return (elected if "ties" in kind else added)(deltas, factors.weights)


def judge(delta: Tracked, by: Arithmetic, a: torch.Tensor, b: torch.Tensor) -> Judged:
    """Judge the factors of a cut decomposition.

    Parameters
    ----------
    delta : Tracked
        What was decomposed, (out, in).
    by : Arithmetic
        Of the factors' own dtype.
    a, b : torch.Tensor
        What the device computed, (rank, in) and (out, rank), float64 on the CPU.
    """
    rank = len(a)
    matrix = torch.from_numpy(np.ascontiguousarray(delta.value))
    exact = torch.linalg.svdvals(matrix)
    exact = torch.nn.functional.pad(exact, (0, max(0, rank + 1 - len(exact))))[: rank + 1]
    off = float(np.linalg.norm(delta.error))
    growth = _GROWTH * max(matrix.shape) * by.unit
    # the factor B is the product of vectors and a diagonal, and both factors are stored
    stored = by.stored + gamma(rank, by.product) + by.products.product_error
    floor = math.sqrt(max(matrix.shape)) * (by.stored_floor + rank * (by.floor + 2 * by.products.smallest))
    allowed = by.shares * (off + (3 * growth + 2 * stored) * (float(exact[0]) + off) + floor)
    values = torch.linalg.vector_norm(b, dim=0)
    exact_b = matrix @ a.T
    sure = values > 0
    exact_a = torch.where(sure[:, None], (matrix.T @ b / torch.where(sure, values, 1.0).square()).T, a)
    errors_a = torch.linalg.vector_norm(exact_a - a, dim=1) * values
    products = a @ a.T - torch.eye(rank, dtype=a.dtype)
    of_rows = by.shares * (2 * (growth + stored) + (growth + stored) ** 2 + floor)
    return Judged(
        exact_a=exact_a,
        exact_b=exact_b,
        allowed_a=(allowed / (torch.where(sure, values, 1.0) * math.sqrt(a.shape[1])))[:, None].expand_as(a),
        allowed_b=torch.full_like(b, allowed / math.sqrt(len(b))),
        share_a=_worst(errors_a / allowed),
        share_b=_worst(torch.linalg.vector_norm(exact_b - b, dim=0) / allowed),
        share_values=_worst((values - exact[:rank]).abs() / allowed),
        share_orthonormal=_worst(products.abs() / of_rows),
        values=values.tolist(),
        exact_values=exact.tolist(),
        is_cut_sure=float(exact[rank - 1] - exact[rank]) > 2 * allowed,
    )


def _delta(by: Arithmetic, b: np.ndarray, a: np.ndarray, scaling: float) -> Tracked:
    found = (by.known(b).matmul(by.known(a)).store() * by.constant(scaling)).store()
    # products of zeros are zeros: subnormal results, which the bound allows for, cannot come of them
    zero = np.abs(b) @ np.abs(a) == 0
    return Tracked(value=found.value, error=np.where(zero, 0.0, found.error), by=by)


def _largest(term: Tracked) -> Tracked:
    """Return the largest elements by magnitude.

    One that is kept may be left out where an error is enough to make one that is not as large; and the reverse.
    """
    size, count = np.abs(term.value), int(DENSITY * term.value.size)
    kept = np.zeros(size.size, dtype=bool)
    kept[np.argpartition(size.ravel(), size.size - count)[size.size - count :]] = True
    kept = kept.reshape(size.shape)
    most, least = size + term.error, size - term.error
    largest_out = np.max(most, where=~kept, initial=-1.0)
    unsure = np.where(kept, least <= largest_out, most >= np.min(least, where=kept, initial=np.inf))
    error = np.where(unsure & (most > 0), most, np.where(kept, term.error, 0.0))
    return Tracked(value=np.where(kept, term.value, 0.0), error=error, by=term.by)


def _worst(shares: torch.Tensor) -> float:
    found = float(shares.max()) if shares.numel() else 0.0
    return math.inf if found != found else found
