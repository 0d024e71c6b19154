"""A tensor that is not base + adapter, and what a mistake would have made of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from consistency.extras.merging.check_merged.adapter import LowRankTarget
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.merge_writer import MergeWriter
from consistency.extras.merging.check_merged.orders import LowRankSum

SAMPLE = 64
"""Rows, and matrices of a stack, that a fit is made of."""

FEW = 8
"""Rows, and matrices, of a fit that tells whether the delta is another layer's, of which there may be hundreds."""

_LEAST_SIZE = 1e-3
"""Least square size of an element in a fit, relative to the mean square: below, the delta's own roundings decide."""

_NEAR = 0.05
"""Relative distance of a fitted scaling from one that is then computed: a fit to rounded values is not exact."""

_FITS = 0.9
"""Part of the difference, root mean square, that a fit may leave over for its mistake to be computed."""


_MOST_OF_RANKS = 1 << 19
"""Elements of the products of single ranks that are fitted to the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of attention that a config states: of queries, of keys and values, and the rows of each."""

    queries: int
    keys: int
    size: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Heads | None:
        """Return the heads of a config, or of the text model in it; None where it does not state them."""
        for table in (config, *(value for value in config.values() if isinstance(value, dict))):
            queries = table.get("num_attention_heads") or table.get("n_head")
            hidden = table.get("hidden_size") or table.get("n_embd")
            if queries and hidden:
                size = table.get("head_dim") or hidden // queries
                return cls(queries=int(queries), keys=int(table.get("num_key_value_heads") or queries), size=int(size))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a mistake would have added to the base: `scaling * left @ right`, and a text about it."""

    cause: MergeCause
    text: str
    left: torch.Tensor
    right: torch.Tensor
    scaling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeQuestion:
    """A tensor that is not base + adapter, and what is known of it.

    Attributes
    ----------
    actual, base : torch.Tensor
        The folder's tensor and the base's, `(stack, rows, columns)`.
    target : LowRankTarget
        The low-rank delta that should have been added.
    writer : MergeWriter
        Finds the roundings of the folder's writer.
    others : sequence of float
        Scalings of other modules of the adapter.
    layers : sequence of LowRankTarget
        Other modules whose delta has this one's shape.
    heads : Heads or None
        The heads of the model's attention.
    upright : MergeQuestion or None
        The question of which this one is the transposed, if it is.
    """

    actual: torch.Tensor
    base: torch.Tensor
    target: LowRankTarget
    writer: MergeWriter
    others: Sequence[float] = ()
    layers: Sequence[LowRankTarget] = ()
    heads: Heads | None = None
    upright: MergeQuestion | None = None
    # by rows: the difference of sampled rows, each element over its size, and that size
    _weighed: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def is_matrix(self) -> bool:
        """Return whether the tensor is one matrix of several rows and columns, and no stack of them."""
        return self.target.shape[0] == 1 and min(self.target.shape[1:]) > 1

    @property
    def row(self) -> str:
        """Return what a row of these tensors is called in the folder's."""
        return "row" if self.upright is None else "column"

    def transposed(self) -> MergeQuestion:
        """Return the same question about the transposed tensors, whose rows are the columns of these.

        They are views: copying whole tensors takes longer than most of what is asked of them.
        """
        left, right = (factor.transpose(1, 2).contiguous() for factor in (self.target.right, self.target.left))
        return MergeQuestion(
            actual=self.actual.transpose(1, 2),
            base=self.base.transpose(1, 2),
            target=replace(self.target, left=left, right=right, flat=()),
            writer=self.writer,
            heads=self.heads,
            upright=self,
        )

    def sums(
        self, left: torch.Tensor, right: torch.Tensor, scaling: float
    ) -> Iterator[tuple[torch.Tensor, LowRankSum]]:
        """Yield each matrix of the stack with the sum of its base and this delta."""
        for matrix, weight, b, a in zip(self.actual, self.base, left, right, strict=True):
            yield matrix, LowRankSum(weight, b, a, scaling)

    def holds(self, left: torch.Tensor, right: torch.Tensor, scaling: float, *, is_twice: bool = False) -> bool:
        """Return whether the tensor is the base and this delta, in every element.

        With `is_twice` the delta was added a second time, to what the first merge had left.
        """
        sums = self.sums(left, right, scaling)
        return all(self.writer.explains(matrix, low_rank_sum, is_twice=is_twice) for matrix, low_rank_sum in sums)

    def holds_in_rows(self, is_merged: torch.Tensor) -> bool:
        """Return whether a matrix holds the base and the delta in some rows, `(rows,)` bool, and the base in others.

        A row without its delta is one whose factor is zero. Transposed tensors are read as the folder has them.
        """
        target = self.target
        left = torch.where(is_merged[:, None], target.left, 0.0)
        if self.upright is None:
            return self.holds(left, target.right, target.scaling)
        return self.upright.holds(target.right.transpose(1, 2), left.transpose(1, 2), target.scaling)

    def is_delta_alone(self) -> bool:
        """Return whether the tensor is the delta without the base."""
        rows = self.actual[:, :: max(1, self.actual.shape[1] // FEW)].double()
        delta = self.target.left[:, :: max(1, self.actual.shape[1] // FEW)].double() @ self.target.right.double()
        if float((rows - self.target.scaling * delta).norm()) > (1 - _FITS) * float(rows.norm()):
            return False
        zero = torch.zeros_like(self.base[0])
        sums = self.sums(self.target.left, self.target.right, self.target.scaling)
        return all(self.writer.explains(matrix, replace(low_rank_sum, base=zero)) for matrix, low_rank_sum in sums)

    def is_likely(self, candidate: Candidate) -> bool:
        """Return whether a fit to some rows permits a candidate."""
        factor, left_over = self.fit(candidate.left, candidate.right)
        return is_fit(left_over) and is_near(factor, candidate.scaling)

    def fit(self, left: torch.Tensor, right: torch.Tensor, *, rows: int = SAMPLE) -> tuple[float, float]:
        """Return the factor of a product that fits the difference best, and the part that it leaves over.

        Where a weight is large a small delta is rounded away, always to the same side: so each element weighs as much
        as it is sure, by one over the square of its size.
        """
        stack, sampled_rows = (slice(None, None, max(1, size // rows)) for size in self.base.shape[:2])
        if rows not in self._weighed:
            before = self.base[stack, sampled_rows].double()
            size = (before.square() + _LEAST_SIZE * before.square().mean()).sqrt_().clamp_(min=1e-300)
            self._weighed[rows] = (self.actual[stack, sampled_rows].double() - before) / size, size
        difference, size = self._weighed[rows]
        delta = (left[stack, sampled_rows].double() @ right[stack].double()) / size
        square = float(delta.square().sum())
        factor = float((difference * delta).sum()) / square if square else 0.0
        whole = float(difference.square().sum())
        left_over = float((difference - factor * delta).square().sum())
        return factor, math.sqrt(left_over / whole) if whole else 1.0

    def fit_ranks(self) -> torch.Tensor:
        """Return the factor of the delta of each rank, with which their sum fits the difference best: `(rank,)`."""
        left, right = self.target.left[0].double() * self.target.scaling, self.target.right[0].double()
        rank, columns = right.shape
        most_rows = max(SAMPLE // 4, _MOST_OF_RANKS // (rank * columns))
        rows = slice(None, None, max(1, -(-len(left) // most_rows)))
        before = self.base[0, rows].double()
        size = (before.square() + _LEAST_SIZE * before.square().mean()).sqrt_().clamp_(min=1e-300)
        change = ((self.actual[0, rows].double() - before) / size).reshape(-1)
        products = (left[rows].T[:, :, None] * right[:, None, :]).div_(size).reshape(rank, -1)
        gram, along = products @ products.T, products @ change
        if not bool(along.isfinite().all() and gram.isfinite().all()):
            return torch.zeros_like(along)
        factors: torch.Tensor = torch.linalg.lstsq(gram, along[:, None], driver="gelsd").solution
        return factors[:, 0]


def is_fit(left_over: float) -> bool:
    """Return whether a fit that leaves this part of the difference over is reason to compute the mistake."""
    return left_over < _FITS


def is_near(fitted: float, scaling: float) -> bool:
    """Return whether a fitted scaling may be one that is known."""
    return abs(fitted - scaling) <= _NEAR * abs(scaling)
