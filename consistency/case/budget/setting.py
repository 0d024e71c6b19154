"""What a worker is to do, and what one stage of it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from consistency.case.budget.constants import TRAINING_PARTS
from consistency.case.budget.shape import Shape
from consistency.case.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one stage takes.

    Attributes
    ----------
    host_bytes : int
        Private memory above what the worker holds.
    device_bytes : int
        Memory of the device above what the worker holds on it.
    window_bytes : int
        Of files that are mapped beside the model.
    scratch_bytes, kept_bytes : int
        Of files in the scratch folder: removed when the stage ends, and kept for the workers of the case.
    """

    host_bytes: int = 0
    device_bytes: int = 0
    window_bytes: int = 0
    scratch_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a worker is to do.

    Attributes
    ----------
    on_device : bool
        Whether the model is on an accelerator.
    makes_reference : bool
        Whether it computes the float64 reference.
    """

    shape: Shape
    case: Case
    on_device: bool
    makes_reference: bool

    @property
    def sequences(self) -> int:
        return self.shape.sequences or self.case.sequences

    @property
    def tokens(self) -> int:
        """Return the positions of one sequence."""
        longest = self.shape.positions
        tokens = self.shape.tokens or self.case.tokens
        return tokens if longest is None or self.shape.tokens is not None else min(tokens, longest)

    @property
    def positions(self) -> int:
        """Return the positions of all sequences."""
        return self.sequences * self.tokens

    @property
    def of_a_step(self) -> int:
        """Return the positions of one step of a training."""
        return math.ceil(self.sequences / min(TRAINING_PARTS, self.sequences)) * self.tokens
