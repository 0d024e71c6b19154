r"""Judge the result of `svd` on deltas: singular values and vectors, however close the values are.

PEFT adds the weighted deltas to D, takes its singular value decomposition on the device, and keeps the largest r:
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

The other `_svd` types leave out elements of the deltas first. No closed form says what is then decomposed; that the
rows of A are orthonormal is known of these too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from consistency.extras.peft_api.adapters.layer_factors import LayerFactors
from consistency.extras.peft_api.adapters.pruned import added
from consistency.numerics.bound import gamma
from consistency.numerics.running_error import Arithmetic, Tracked

TRUNCATED = ("svd", "ties_svd", "magnitude_prune_svd", "dare_linear_svd", "dare_ties_svd")

_GROWTH = 10
"""How errors of a decomposition grow with its size, by the LAPACK Users' Guide; see above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The exact values beside a device's factors, what their errors may be, and the ratios of the two."""

    exact_a: torch.Tensor
    exact_b: torch.Tensor
    """`exact_a`, `exact_b`: Float64: each factor as the other one and D determine it."""
    allowed_a: torch.Tensor
    allowed_b: torch.Tensor
    """`allowed_a`, `allowed_b`: allowed error of each element, if the error were spread over the vector evenly: then a
    vector outside has an element outside."""
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


def combined_delta(by: Arithmetic, factors: LayerFactors) -> Tracked:
    """Return the weighted sum of the deltas before it is cut, as a matrix (out, in)."""
    deltas = [
        _delta(by, b.reshape(len(b), -1), a.reshape(len(a), -1), scaling)
        for a, b, scaling in zip(factors.a, factors.b, factors.scalings, strict=True)
    ]
    return added(deltas, factors.weights)


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
    delta_error = float(np.linalg.norm(delta.error))
    growth, stored, floor = _roundings(by, rank, max(matrix.shape))
    allowed = by.shares * (delta_error + (3 * growth + 2 * stored) * (float(exact[0]) + delta_error) + floor)
    # B holds the singular values as the lengths of its columns; the rows of A have length 1
    values = torch.linalg.vector_norm(b, dim=0)
    exact_b = matrix @ a.T
    # a singular value of 0 determines no vector of A, so the device's own stands for it
    is_determined = values > 0
    divisors = torch.where(is_determined, values, 1.0)
    exact_a = torch.where(is_determined[:, None], (matrix.T @ b / divisors.square()).T, a)
    errors_a = torch.linalg.vector_norm(exact_a - a, dim=1) * values
    return Judged(
        exact_a=exact_a,
        exact_b=exact_b,
        allowed_a=(allowed / (divisors * math.sqrt(a.shape[1])))[:, None].expand_as(a),
        allowed_b=torch.full_like(b, allowed / math.sqrt(len(b))),
        share_a=_worst(errors_a / allowed),
        share_b=_worst(torch.linalg.vector_norm(exact_b - b, dim=0) / allowed),
        share_values=_worst((values - exact[:rank]).abs() / allowed),
        share_orthonormal=share_orthonormal(by, a, max(matrix.shape)),
        values=values.tolist(),
        exact_values=exact.tolist(),
        is_cut_sure=float(exact[rank - 1] - exact[rank]) > 2 * allowed,
    )


def share_orthonormal(by: Arithmetic, a: torch.Tensor, longest: int) -> float:
    """Return the distance of rows from orthonormal ones, over what is allowed.

    Parameters
    ----------
    by : Arithmetic
        Of the factors' own dtype.
    a : torch.Tensor
        The factor A that the device computed, (rank, in), float64 on the CPU.
    longest : int
        The longer side of the matrix that was decomposed.
    """
    growth, stored, floor = _roundings(by, len(a), longest)
    products = a @ a.T - torch.eye(len(a), dtype=a.dtype)
    return _worst(products.abs() / (by.shares * (2 * (growth + stored) + (growth + stored) ** 2 + floor)))


def _roundings(by: Arithmetic, rank: int, longest: int) -> tuple[float, float, float]:
    """Return three errors: of the decomposition, of storing its factors, and the least one of a vector."""
    # the factor B is the product of vectors and a diagonal, and both factors are stored
    stored = by.stored + gamma(rank, by.product) + by.products.product_error
    floor = math.sqrt(longest) * (by.stored_floor + rank * (by.floor + 2 * by.products.smallest))
    return _GROWTH * longest * by.unit, stored, floor


def _delta(by: Arithmetic, b: np.ndarray, a: np.ndarray, scaling: float) -> Tracked:
    delta = (by.known(b).matmul(by.known(a)).store() * by.constant(scaling)).store()
    # products of zeros are zeros: subnormal results, which the bound allows for, cannot come of them
    is_zero = np.abs(b) @ np.abs(a) == 0
    return Tracked(value=delta.value, error=np.where(is_zero, 0.0, delta.error), by=by)


def _worst(ratios: torch.Tensor) -> float:
    """Return the largest ratio; infinite where one is NaN."""
    largest = float(ratios.max()) if ratios.numel() else 0.0
    return math.inf if math.isnan(largest) else largest
