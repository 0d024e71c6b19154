r"""What is in a tensor beside the base, or beside base + adapter, where no mistake explains it.

Its difference from the base, and from base + adapter, is held against what another adapter would leave: a matrix of low
rank and roundings. Where neither is, the tensor is measured: how far each element is in units of its last place, how
much of the adapter fits the difference best, and how much that leaves over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.difference import noise_norm
from consistency.extras.merging.check_merged.orders import LowRankSum
from consistency.extras.merging.check_merged.outside import unlike_one_rounding
from consistency.extras.merging.check_merged.question import FEW, MergeQuestion
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.typed import HALF_TYPES

_MOST_ROWS = 128
"""Rows, evenly taken, of which a rank is computed."""

_ROUNDINGS = 1.5
"""Unit roundoffs by which an element may be off a matrix of low rank: of both sums, and of the matrix itself."""

_MOST_UNITS = 8
"""Units in the last place up to which an element is said to be off by roundings."""

_LEAST_UNITS = 0.25
"""Units in the last place by which an element is off at least: it has another value than it should."""

_LEAST_OFF = 0.01
"""Part of the elements that merging and unmerging moves, at least; of fewer, something else is the reason."""

_DEVIATIONS = 6.0
"""Standard deviations by which roundings may have a direction by chance."""

_MOST_OF_A_CHECKPOINT = 0.6
"""Part of the change that another checkpoint of an adapter leaves over, at most, beside that adapter."""

_SAME_SCALE = 1e-4
"""Relative distance of a fitted scaling from the adapter's, below which it is that."""

_FAR_SCALE = 0.1
"""Distance of the adapter's factor from 1, or from 0, at which it is what is wrong, or is hardly there."""

_FULL = 0.8
"""Part of the singular values of a sketch that are above the noise where all of the matrix may be."""

_LEAST_BETTER = 0.7
"""What a fitted scaling leaves over, over what the adapter's own does, at most: less is made by chance."""

_SKETCHES = (24, 128)
"""Singular values that are computed: ranks up to 100, most of them far below."""

_MOST_RANK = 0.3
"""Rank over the rows or columns, whichever are fewer, up to which a change is said to be of low rank."""

_EXPONENT = 0x7FF << 52
"""Bits of a float64 that are its exponent."""

_LEAST_SPREAD = 1 / 16
"""Part of the rows, and of the columns, over which each rank of an adapter is spread, at least."""


def name_rest(question: MergeQuestion, *, briefly: bool = False) -> dict[MergeCause, str]:
    """Explain a matrix by roundings, or by another adapter, in the place of this one or beside it.

    `briefly` only ranks that are small are found, as for tensors after others that were looked at in vain.
    """
    roundings = Roundings.of(question, least=_LEAST_OFF if briefly else 0.0)
    if roundings is not None and not roundings.is_directed and roundings.share >= _LEAST_OFF:
        return {MergeCause.ROUNDINGS: roundings.text}
    if not question.is_matrix:
        return {}
    target = question.target
    rows = slice(None, None, max(1, target.shape[1] // _MOST_ROWS))
    actual, before = question.actual[0, rows], question.base[0, rows].double()
    delta = (target.left[0, rows].double() @ target.right[0].double()).mul_(target.scaling)
    change = actual.double() - before
    sizes = actual.double().abs() + before.abs() + delta.abs()
    if not bool(change.isfinite().all()):
        return {}
    allowed = _allowed(sizes, actual.dtype)
    if target.scaling and _is_directed(change - delta, delta):
        fitted, _ = question.fit(target.left, target.right)
        times = fitted / target.scaling
        off_fitted, off = change - times * delta, change - delta
        is_better = abs(times - 1) > _SAME_SCALE and float(off_fitted.norm()) < _LEAST_BETTER * float(off.norm())
        if is_better and bool((off_fitted.abs() <= allowed).all()):
            return {MergeCause.WRONG_SCALE: f"{fitted:.6g}, fitted, instead of {target.scaling:g}"}
    if bool(((change - delta).abs() <= allowed).all()):
        return {}
    sketches = _SKETCHES[:1] if briefly else _SKETCHES
    if actual.dtype in HALF_TYPES:  # float32 is exact enough for these
        change, delta, sizes = change.float(), delta.float(), sizes.float()
    whole = _low_rank(change, sizes, actual.dtype, sketches)
    if whole and whole <= target.left.shape[2]:
        return {MergeCause.OTHER_ADAPTER: _in_its_place(question, whole)}
    beside = _low_rank(change - delta, sizes, actual.dtype, sketches)
    if whole and (not beside or whole <= beside):
        return {MergeCause.OTHER_ADAPTER: _in_its_place(question, whole)}
    return {MergeCause.FURTHER_ADAPTER: f"of rank {beside}"} if beside else {}


def _allowed(sizes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return how far rounding may move the elements of a change; `sizes` are those of all that was rounded."""
    return _ROUNDINGS * UNIT_ROUNDOFF.get(dtype, 0.0) * (sizes + sizes.square().mean().sqrt())


def _low_rank(change: torch.Tensor, sizes: torch.Tensor, dtype: torch.dtype, sketches: tuple[int, ...]) -> int | None:
    """Return the rank of a change that is a product of few ranks and roundings; None of another one.

    A wrong element or row is a matrix of rank 1 too. An adapter's ranks are spread over rows and columns: none of them
    is gone without the rows in which one element is largest beside the others.
    """
    noise = noise_norm(sizes / 2, UNIT_ROUNDOFF.get(dtype, 0.0))
    left, values, right = _ranks(change, noise, sketches)
    rank = len(values)
    is_full = rank >= _FULL * sketches[-1]
    if is_full or not 0 < rank <= _MOST_RANK * min(change.shape):
        return None
    of_rank = (left * values) @ right.T
    if not bool(((change - of_rank).abs() <= _allowed(sizes + of_rank.abs(), dtype)).all()):
        return None
    for vectors in (left, right):
        spread = 1 / vectors.pow(4).sum(dim=0).clamp(min=1e-30)
        if float(spread.min()) < max(2.0, _LEAST_SPREAD * len(vectors)):
            return None
    peak = change.abs().amax(dim=1) / change.norm(dim=1).clamp(min=1e-30)
    flat = peak.argsort()[: -max(1, int(_LEAST_SPREAD * len(peak)))]
    return rank if len(_ranks(change[flat], noise, sketches)[1]) == rank else None


def _ranks(
    change: torch.Tensor, noise: float, sketches: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the singular vectors and values of a matrix above a noise; all of a sketch where they are many."""
    smaller = min(change.shape)
    for size in sketches:
        left, values, right = _truncated_svd(change, min(size, smaller))
        rank = int((values > 2 * noise).sum())
        if rank < _FULL * size:
            break
    return left[:, :rank], values[:rank], right[:, :rank]


def _truncated_svd(matrix: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest singular values of a matrix with their vectors, the same for each call.

    By the range of the matrix times random vectors, and one power iteration (Halko, Martinsson and Tropp, *SIAM Review*
    53, 2011), as `torch.svd_lowrank` does. That one draws by torch's own generator, which threads have in common.
    """
    drawn = torch.randn(matrix.shape[1], size, generator=torch.Generator().manual_seed(0), dtype=matrix.dtype)
    basis = torch.linalg.qr(matrix @ drawn).Q
    basis = torch.linalg.qr(matrix.T @ basis).Q
    basis = torch.linalg.qr(matrix @ basis).Q
    # the singular values of a few long rows are those of a small triangle, which take a third of the time
    rows, triangle = torch.linalg.qr(matrix.T @ basis)
    left, values, right = torch.linalg.svd(triangle.T)
    return basis @ left, values, rows @ right.T


def _is_directed(error: torch.Tensor, delta: torch.Tensor) -> bool:
    """Return whether errors are along the delta, more than they are by chance."""
    along = float((error * delta).sum())
    deviation = math.sqrt(float(error.square().mean()) * float(delta.square().sum()))
    return abs(along) > _DEVIATIONS * deviation


def _in_its_place(question: MergeQuestion, rank: int) -> str:
    """Return the rank of another adapter, and whether it is like this one."""
    target = question.target
    factor, left_over = question.fit(target.left, target.right)
    text = f"of rank {rank}"
    if target.scaling and rank <= target.left.shape[2] and left_over < _MOST_OF_A_CHECKPOINT:
        return f"{text}, near {factor / target.scaling:.2f} × this one: another checkpoint of it?"
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Roundings:
    """Elements that are off base + adapter, all by few units in the last place.

    Attributes
    ----------
    off, count : int
        Elements that are off, and all.
    most : float
        Units in the last place by which one is off at most.
    is_directed : bool
        Whether the errors are along the delta: then they are no roundings.
    """

    off: int
    count: int
    most: float
    is_directed: bool

    @classmethod
    def of(cls, question: MergeQuestion, *, least: float = 0.0) -> Roundings | None:
        """Return the elements that are off; None where one is off by more than roundings.

        Nor are they looked for where fewer than `least` of some rows are off.
        """
        target, unit = question.target, UNIT_ROUNDOFF.get(question.actual.dtype, 0.0)
        off, count, most, along, square, error_square = 0, 0, 0.0, 0.0, 0.0, 0.0
        for matrix, low_rank_sum in question.sums(target.left, target.right, target.scaling):
            few = slice(None, None, max(1, len(matrix) // FEW))
            off_of_few = 0
            for _, units, _ in _off_one_rounding(matrix[few], low_rank_sum.part(few), unit):
                if not float(units.max()) <= _MOST_UNITS:
                    return None
                off_of_few += int((units > _LEAST_UNITS).sum())
            if off_of_few < least * matrix[few].numel():
                return None
            for error, units, delta in _off_one_rounding(matrix, low_rank_sum, unit):
                if not float(units.max()) <= _MOST_UNITS:
                    return None
                most = max(most, float(units.max()))
                off += int((units > _LEAST_UNITS).sum())
                along += float((error * delta).sum())
                error_square += float(error.square().sum())
            count, square = count + matrix.numel(), square + low_rank_sum.delta_square()
        if not off:
            return None
        is_directed = abs(along) > _DEVIATIONS * math.sqrt(error_square / count * square)
        return cls(off=off, count=count, most=most, is_directed=is_directed)

    @property
    def share(self) -> float:
        """Return the elements that are off over all."""
        return self.off / self.count

    @property
    def text(self) -> str:
        """Return how many elements are off, and by how much."""
        many = (
            f"{self.share:.1%} of the elements" if self.share >= _LEAST_OFF else f"{self.off} of {self.count} elements"
        )
        units = "1 unit" if self.most < 1.5 else f"{round(self.most)} units"
        return f"{many} off, by {units} in the last place at most"


def _off_one_rounding(
    actual: torch.Tensor, of: LowRankSum, unit: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield the elements that one rounding does not make, `(n,)`: their errors, these in last places, their deltas."""
    for values, base, delta in unlike_one_rounding(actual, of):
        exact = base + delta
        # an element may be small where a base and a delta were rounded that were not
        size = torch.maximum(torch.maximum(exact.abs(), base.abs()), delta.abs()).clamp(min=1e-300)
        error = values.double() - exact.to(values.dtype).double()
        yield error, error.abs() / _power_below(size).mul_(2 * unit), delta


def _power_below(sizes: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two that is not above each of some positive float64 numbers, none subnormal.

    It is the number without the bits of its fraction.
    """
    return sizes.view(torch.int64).bitwise_and(_EXPONENT).view(torch.float64)


def measured(question: MergeQuestion) -> tuple[str, str]:
    """Return how much of the adapter is in a tensor, how large the rest is, and what to do; "" for the usual advice."""
    roundings = Roundings.of(question)
    if roundings is not None:
        return f"base + adapter, but for {roundings.text}", ""
    target = question.target
    factor, left_over = question.fit(target.left, target.right)
    times = factor / target.scaling if target.scaling else 0.0
    if left_over < _MOST_OF_A_CHECKPOINT:
        advice = "look for what was merged or trained besides the adapter"
        if abs(times - 1) > _FAR_SCALE:
            advice = (
                f"look for what takes the adapter × {times:.2f}, as a weight of several does, and for what is besides"
            )
        return f"base + adapter × {times:.2f}, and {left_over:.1%} of the change is something else", advice
    before = question.base.double()
    size = float((question.actual.double() - before).norm()) / max(float(before.norm()), 1e-300)
    advice = "give the base and the adapter that this folder was made from: little of this adapter is in it"
    text = f"it is {size:.1%} of its norm from the base, by no low rank, and adapter × {times:.2f} fits that best"
    return text, advice if abs(times) < _FAR_SCALE else ""
