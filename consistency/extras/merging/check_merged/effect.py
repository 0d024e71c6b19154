"""What rounding took of an adapter's effect in a merged folder."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from consistency.extras.merging.check_merged.orders import LowRankSum, square_of


@dataclass(slots=True)
class Effect:
    """The part of the adapter's effect that rounding took: sums of squares over sampled rows of all tensors.

    Attributes
    ----------
    delta : float
        Squares of the exact deltas.
    lost : float
        Squares of the errors of the folder.
    least : float
        Squares of the errors of a merge that rounds once.
    in_float32 : float
        Squares of the errors of a merge that is saved in float32.
    """

    delta: float = 0.0
    lost: float = 0.0
    least: float = 0.0
    in_float32: float = 0.0

    def add(self, actual: torch.Tensor, of: LowRankSum) -> None:
        """Add a tensor that is right."""
        delta = of.delta(of.sample)
        exact = of.base[of.sample].double() + delta
        self.delta += square_of(delta)
        self.lost += square_of(actual[of.sample] - exact)
        self.least += square_of(exact.to(actual.dtype) - exact)
        self.in_float32 += square_of(exact.float() - exact)

    def include(self, other: Effect) -> None:
        """Add the sums of other tensors."""
        for name in ("delta", "lost", "least", "in_float32"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def share(self, name: str) -> float:
        """Return an error relative to the delta, both root mean square."""
        return math.sqrt(getattr(self, name) / self.delta) if self.delta else 0.0
