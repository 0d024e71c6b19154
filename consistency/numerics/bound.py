r"""What a computed tensor may be off from its exact value, derived.

A LoRA merge computes :math:`W' = W + s\,(B A)` with rank :math:`K`. With :math:`D = |s|\,(|B|\,|A|)` elementwise and
:math:`\gamma_n = n u / (1 - n u)` (Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., lemma 3.1):

* An inner product of length K in float32, in any order, is off by at most :math:`\gamma_K`; the scaling is itself
  rounded to float32 and multiplied, two more roundings: :math:`|\hat\delta - \delta| \le \gamma_{K+2} D` with
  :math:`u = 2^{-24}`. Units that truncate when they accumulate (tensor cores, which bfloat16 and float16 operands
  reach) have twice the unit roundoff.
* Where float32 products run in TF32 each operand is first cut to 10 stored mantissa bits, off by at most
  :math:`t = 2^{-10}` where the unit truncates (half of it where it rounds; which one does is not documented):
  :math:`(2 t + t^2) D` more, and the accumulation truncates.
* An adapter in bfloat16 or float16 stores the product, the scaling and the delta: three roundings more,
  :math:`3 u_{\text{adapter}} D`.
* The store of :math:`W'` rounds once, :math:`u_W (|W| + D)`; a safe merge and an embedding's merge round the delta to
  the weight's dtype first: twice.
* What is added to W is the finished delta, as PEFT does it; a fused product that accumulates into W rounds |W| K times
  and has another bound.
* Each rounding to a subnormal adds at most half the smallest subnormal of its dtype.

Against another device, twice the bound, for each of the two may use it up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from consistency.numerics.distance import Measure
from consistency.numerics.dtype import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from consistency.numerics.error import CHUNK, ErrorTally

_FLOAT32 = UNIT_ROUNDOFF[torch.float32]

_BLOCK = 2 * CHUNK
"""Elements per product: at least two chunks, while it is still in cache."""

_BLAS_ROWS = 32
"""Rows per product: with fewer, BLAS spends its time on laying out the other factor (16 cost 20 %, 4 twice as much)."""

_ONE_THREAD = 1 << 18
"""Multiplications per product: more of them OpenBLAS shares out (interface/gemm.c: 4 * 65536), among threads that spin
against torch's and, on a busy machine, wait for one another: seen fifty times as slow."""

_LARGEST_BLOCK = 1 << 19
"""Elements per product at most, 4 MiB of float64, however wide a weight is."""

TF32_ROUNDOFF = 2.0**-10
"""Largest relative error of an operand that is cut to TF32's 10 stored mantissa bits: truncated, not rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What an element may be off: `product * D + weight * |W| + floor`.

    Attributes
    ----------
    product : float
        Coefficient of :math:`D`, the magnitude that went into the element's inner product.
    weight : float
        Coefficient of the magnitude of the base weight.
    floor : float
        Absolute part, from roundings to subnormals.
    """

    product: float
    weight: float = 0.0
    floor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UserAllowance:
    """What an element may be off where the user says so: `atol + rtol * |exact|`.

    Attributes
    ----------
    atol : float
        In the tensor's own unit.
    rtol : float
        Share of the exact element's magnitude.
    """

    atol: float
    rtol: float

    def around(self, exact: np.ndarray) -> np.ndarray:
        """Return what each element of a chunk of float64 values may be off."""
        with np.errstate(all="ignore"):  # a tolerance of the user's own may overflow: anything is then allowed
            found: np.ndarray = np.abs(exact)
            found *= self.rtol
            found += self.atol
        return found


def gamma(n: int, u: float) -> float:
    """Return :math:`n u / (1 - n u)`, which bounds the relative error of n roundings."""
    return n * u / (1 - n * u)


def delta_allowance(
    rank: int, *, scaling: float, adapter: torch.dtype, truncating: bool = False, tf32: bool = False
) -> Allowance:
    """Bound the error of a LoRA delta.

    Parameters
    ----------
    rank : int
    scaling : float
    adapter : torch.dtype
        Dtype that the adapter's parameters have on the device.
    truncating : bool
        Whether the device multiplies this dtype on units that truncate when they accumulate.
    tf32 : bool
        Whether float32 products may run in TF32, on units that truncate too.
    """
    truncating = truncating or (tf32 and adapter == torch.float32)
    u = 2 * _FLOAT32 if truncating else _FLOAT32
    product = gamma(rank + 2, u)
    floor = HALF_SMALLEST_SUBNORMAL[torch.float32] * (rank * abs(scaling) + 2)
    if adapter in (torch.bfloat16, torch.float16):
        product += 3 * UNIT_ROUNDOFF[adapter]
        floor += HALF_SMALLEST_SUBNORMAL[adapter] * (abs(scaling) + 2)
    elif adapter == torch.float32 and tf32:
        product += 2 * TF32_ROUNDOFF + TF32_ROUNDOFF**2
    elif adapter == torch.float64:
        product = gamma(rank + 2, UNIT_ROUNDOFF[torch.float64])
    return Allowance(product=product, floor=floor)


def merged_allowance(delta: Allowance, *, weight: torch.dtype, roundings: int) -> Allowance:
    """Bound the error of a merged weight that is stored after `roundings` roundings to its dtype."""
    u = roundings * UNIT_ROUNDOFF[weight]
    floor = delta.floor + roundings * HALF_SMALLEST_SUBNORMAL[weight]
    return Allowance(product=delta.product + u, weight=u, floor=floor)


def measure_low_rank(
    actual: torch.Tensor,
    *,
    left: torch.Tensor,
    right: torch.Tensor,
    scaling: float,
    base: torch.Tensor | None,
    allowance: Allowance | UserAllowance,
) -> Measure:
    r"""Measure how far a delta or a merged weight is from :math:`W + s\,(L R)` in float64.

    Parameters
    ----------
    actual : torch.Tensor
        `(rows, columns)` on the CPU.
    left, right : torch.Tensor
        `(rows, rank)` and `(rank, columns)`: B and A, or the transposes of A and B where the layer stores its weight
        as (in, out).
    scaling : float
    base : torch.Tensor or None
        `(rows, columns)`, the weight before the merge; None for a delta.
    allowance : Allowance or GivenAllowance
    """
    rows, columns = actual.shape
    tally = ErrorTally(shape=(rows, columns), dtype=actual.dtype)
    scaled = left.detach().to(torch.float64).numpy() * scaling
    right64 = right.detach().to(torch.float64).numpy()
    scaled_size, right_size = np.abs(scaled), np.abs(right64)
    step = max(1, min(max(_BLOCK // max(1, columns), _BLAS_ROWS), _LARGEST_BLOCK // max(1, columns)))
    products = np.empty((2, min(step, rows), columns))
    held = np.empty(CHUNK)
    for row in range(0, rows, step):
        part = slice(row, min(rows, row + step))
        exact_rows, size_rows = products[:, : part.stop - row]
        with np.errstate(all="ignore"):  # factors that are not finite: what comes of them is outside
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
            tally.add(tested[chunk], exact[chunk], allowed=allowed, start=row * columns + start)
    return tally.result()


def _multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Multiply into `out` in pieces that OpenBLAS does on this thread alone."""
    rows, rank = left.shape
    width = max(1, _ONE_THREAD // max(1, rows * rank))
    for start in range(0, right.shape[1], width):
        part = slice(start, start + width)
        np.matmul(left, right[:, part], out=out[:, part])


def _allowed(
    allowance: Allowance | UserAllowance, exact: np.ndarray, size: np.ndarray, weight: np.ndarray | None
) -> np.ndarray:
    """Return what each element of a chunk may be off; what it is computed from, `size` and `weight`, is used up."""
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


def measure_against_exact(actual: torch.Tensor, exact: torch.Tensor, allowance: UserAllowance | None = None) -> Measure:
    """Measure how far a tensor is from a float64 reference of the same shape, both on the CPU.

    Without an allowance there is no `bound_ratio`: what may be off is then known of the tensor as a whole alone.
    """
    flat, reference = actual.detach().reshape(-1), exact.detach().reshape(-1).numpy()
    tally = ErrorTally(shape=tuple(actual.shape), dtype=actual.dtype)
    for start in range(0, flat.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        allowed = None if allowance is None else allowance.around(reference[part])
        tally.add(flat[part], reference[part], allowed=allowed, start=start)
    return tally.result()


def independent_rows(actual: torch.Tensor, exact: torch.Tensor) -> int:
    r"""Count the rows of an activation that carry its error: :math:`(\sum E)^2 / \sum E^2`, E the row's squared error.

    The elements of one token share what they were computed from, so an activation has no more independent errors than
    it has rows. A model that amplifies the errors of a few tokens has fewer: this, the participation number, is the
    number of rows where all are off alike, and 1 where one row carries everything.
    """
    difference = actual.detach().to(torch.float64) - exact.detach()
    rows = torch.linalg.vector_norm(difference if actual.dim() > 1 else difference.reshape(-1, 1), dim=-1)
    energy = rows.nan_to_num(posinf=0.0).square()
    return max(1, int(energy.sum().square() / energy.square().sum())) if bool(energy.any()) else max(1, rows.numel())


def independent_lines(actual: torch.Tensor, exact: torch.Tensor) -> int:
    """Count the rows or the columns of gradients that carry their error, whichever are fewer: see `independent_rows`.

    The gradient of a matrix is a sum over tokens of products of two vectors. Elements of a row share one of them,
    those of a column the other, so it has no more independent errors than the fewer of both; each is itself a sum over
    all tokens. A vector is one row: its elements may be off by one common factor. Gradients of separate passes share
    none. Measured on a healthy kernel variant, 30 methods in float32: up to 2.5 times the CPU's error, and no more than
    half of what is allowed.

    Parameters
    ----------
    actual, exact : torch.Tensor
        `(passes, *shape)` of one parameter.
    """
    error, none = actual.detach().to(torch.float64) - exact.detach(), torch.zeros(())
    error = error.reshape(len(error), -1, 1) if actual.dim() < 3 else error.flatten(2)
    return min(independent_rows(part.reshape(-1, part.shape[-1]), none) for part in (error, error.transpose(1, 2)))
