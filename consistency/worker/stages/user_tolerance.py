"""A tolerance of the user's own, as the computing stages apply it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from consistency.capture.names import TOLERANCE
from consistency.capture.records import RecordStatus
from consistency.case.tolerance import Override, choose
from consistency.numerics.bound import UserAllowance
from consistency.numerics.distance import Measure
from consistency.numerics.dtype import name_of
from consistency.numerics.rules import passes
from consistency.worker.stages.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The override that is meant for a tensor."""

    override: Override

    @classmethod
    def of(cls, context: Context, *, stage: str, layer: str, dtype: torch.dtype) -> Given | None:
        """Return what the user allows for a tensor, None where that is left to the derived rules."""
        return cls.among(context.job.case.tolerance, stage=stage, layer=layer, dtype=dtype)

    @classmethod
    def among(cls, tolerance: Sequence[Override], *, stage: str, layer: str, dtype: torch.dtype) -> Given | None:
        """Return what the user allows for a tensor by these overrides."""
        found = choose(tolerance, stage=stage, layer=layer, dtype=name_of(dtype))
        return None if found is None else cls(override=found)

    @property
    def allowance(self) -> UserAllowance:
        return UserAllowance(atol=self.override.atol, rtol=self.override.rtol)

    @property
    def evidence(self) -> dict[str, str]:
        """Return what a record says of it, in the words of the command line."""
        return {TOLERANCE: str(self.override)}

    @staticmethod
    def status(found: Measure) -> RecordStatus:
        if float(found.max_abs) == 0 and found.mismatched == 0:
            return "equal"
        return "within" if found.bound_ratio is not None and passes(found.bound_ratio) else "outside"
