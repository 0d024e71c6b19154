r"""Base classes of the closed forms, which give exact values with tolerances, block by block of rows.

A form takes its numbers from the files and its formula from the method's definition, so that neither a fault of a
device nor one of PEFT's code is in it. The bound follows PEFT's order of operations (`consistency.numerics.typed`).

Most methods add a delta, :math:`W' = W + \Delta`, which PEFT computes in the dtype of the adapter. `W + delta` is
computed in the wider of both dtypes and rounded to that of the weight. Some merges round the delta to the weight's
dtype first: each form says which.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from consistency.numerics.bound import UserAllowance
from consistency.numerics.chunks import Chunk, Stretch
from consistency.numerics.error import measure_in_parts
from consistency.numerics.measure import Measure
from consistency.numerics.typed import Typed

_BLOCK = 1 << 16
"""Elements of a block: some twenty float64 temporaries of it are 10 MiB, of a layer of any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A tensor on the CPU that a form judges."""

    actual: torch.Tensor
    safe: bool | None
    """How it was merged; None for a delta."""
    tolerance: UserAllowance | None = None
    """The user's tolerance, which replaces the bound."""


class Form(ABC):
    """The exact delta and merged weight of a layer, as `rows` of `width` elements in the order in memory.

    Attributes
    ----------
    weight : torch.Tensor
        The weight before the merge, from its file, in its dtype on the device.
    has_delta : bool
        Whether PEFT gives a delta.
    adds : bool
        Whether a merged weight is the weight and the delta.
    """

    has_delta = True
    adds = False

    def __init__(self, weight: torch.Tensor, *, rows: int | None = None) -> None:
        self.weight = weight.detach().contiguous()
        self.rows = weight.shape[0] if rows is None else rows
        self.width = weight.numel() // max(1, self.rows)

    @property
    def shape(self) -> torch.Size:
        """Shape of weight and delta."""
        return self.weight.shape

    def judges(self, tensor: torch.Tensor, *, safe: bool | None) -> bool:
        """Report whether there is an exact value of a tensor; `safe` is None for a delta."""
        is_delta = safe is None
        if is_delta and not self.has_delta:
            return False
        return tensor.shape == self.shape

    def measure(self, tensors: Sequence[Judged]) -> list[Measure]:
        """Measure tensors against their exact values, which are made once."""
        step = self.rows_per_block
        prepared = [self.prepare(tested) for tested in tensors]

        def stretches(blocks: range) -> Iterator[tuple[Stretch, ...]]:
            starts = range(blocks.start * step, min(self.rows, blocks.stop * step), step)
            return self._stretches(prepared, starts)

        block_count = math.ceil(self.rows / step)
        return measure_in_parts([tested.actual for tested in tensors], stretches, block_count, step * self.width)

    def chunks(self, tested: Judged) -> Iterator[Chunk]:
        """Yield a tensor with exact values and tolerances."""
        starts = range(0, self.rows, self.rows_per_block)
        for (stretch,) in self._stretches([self.prepare(tested)], starts):
            yield from stretch.chunks()

    @property
    def rows_per_block(self) -> int:
        """How many rows are computed at once."""
        return max(1, _BLOCK // max(1, self.width))

    def base(self, rows: slice) -> Typed:
        """Return rows of the weight before the merge."""
        return Typed.known(self.weight.view(self.rows, self.width)[rows])

    def prepare(self, tested: Judged) -> Judged:
        """Return a tensor to judge, with figures over all its rows where the bound of a row needs them."""
        return tested

    @abstractmethod
    def block(self, tensors: Sequence[Judged], rows: slice) -> Sequence[Typed]:
        """Return rows of the exact value of each tensor, with their bounds: `(n, width)`.

        Where a merge `adds`, the value is what is added, and the bound that of the sum.
        """

    def _stretches(self, tensors: Sequence[Judged], starts: Iterable[int]) -> Iterator[tuple[Stretch, ...]]:
        for start in starts:
            rows = slice(start, min(self.rows, start + self.rows_per_block))
            with np.errstate(all="ignore"):  # what is not finite exceeds every tolerance
                exact_rows = self.block(tensors, rows)
                yield tuple(
                    self._stretch(tested, exact, rows) for tested, exact in zip(tensors, exact_rows, strict=True)
                )

    def _stretch(self, tested: Judged, exact: Typed, rows: slice) -> Stretch:
        """Return rows of a tensor with their exact values: what is added beside the base, where a merge `adds`."""
        base, bound = None, None
        if self.adds and tested.safe is not None:
            base = self.weight.view(self.rows, self.width)[rows].reshape(-1)
        if tested.tolerance is None:
            bound = np.ascontiguousarray(exact.allowed).reshape(-1)
        return Stretch(
            start=rows.start * self.width,
            actual=tested.actual.detach().reshape(self.rows, self.width)[rows].reshape(-1),
            value=np.ascontiguousarray(exact.value).reshape(-1),
            base=base,
            size=bound,
            allowance=tested.tolerance,
        )


def whole(chunks: Iterable[Chunk], shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exact values and tolerances of a whole tensor, in float64."""
    exact, allowed = [], []
    for chunk in chunks:
        assert chunk.allowed is not None  # a form's chunks have a bound, or a user's tolerance
        exact.append(chunk.exact)
        allowed.append(chunk.allowed)
    exact_tensor = torch.from_numpy(np.concatenate(exact)).reshape(*shape)
    allowed_tensor = torch.from_numpy(np.concatenate(allowed)).reshape(*shape)
    return exact_tensor, allowed_tensor


class AddedForm(Form):
    """A method that adds a delta.

    Attributes
    ----------
    rounds_delta : tuple of bool
        Whether a plain and a safe merge round the delta to the weight's dtype before they add it.
    """

    adds = True
    rounds_delta = (False, False)

    @abstractmethod
    def delta(self, rows: slice) -> Typed:
        """Return rows of the delta that PEFT gives, with their bounds: `(n, width)`."""

    def block(self, tensors: Sequence[Judged], rows: slice) -> Sequence[Typed]:
        """Return rows of the delta for each tensor, with the bound of the delta or of the sum."""
        delta, base = self.delta(rows), self.base(rows)

        def bounded_sum(*, safe: bool) -> Typed:
            added = delta.to(base.dtype) if self.rounds_delta[safe] else delta
            return replace((base + added).to(base.dtype), value=delta.value)

        exact_rows: list[Typed] = []
        for tested in tensors:
            if tested.safe is None:
                exact_rows.append(delta)
            else:
                exact_rows.append(bounded_sum(safe=tested.safe))
        return exact_rows
