"""What became of log probabilities after they were taken: another base, another token's, fewer digits."""

from __future__ import annotations

import enum
import math

import torch

from consistency.numerics.rules import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF


class Transcription(enum.Enum):
    """How log probabilities were written down; the value is what follows "taken with" in a report."""

    AS_THEY_ARE = ""
    ONE_LATE = "a delay of one token: each is that of the token before"
    ONE_EARLY = "a lead of one token: each is that of the token after"
    BASE_2 = "logarithms of base 2"
    BASE_10 = "logarithms of base 10"
    FLOAT16 = "rounding to float16"
    BFLOAT16 = "rounding to bfloat16"

    def may_be(self, given: torch.Tensor) -> bool:
        """Report whether log probabilities that are given may be written so: all are numbers of the dtype."""
        dtype = _DTYPES.get(self)
        if dtype is None:
            return True
        finite = given[given.isfinite()]
        return torch.equal(finite.to(getattr(torch, dtype)).to(finite.dtype), finite)

    def of(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Return natural log probabilities as they are written down, `(tokens, …)`; NaN where it is not known.

        Rounding is left out: how much it may do is told by `rounding`.
        """
        factor = _FACTORS.get(self, 1.0)
        shift = _SHIFTS.get(self, 0)
        if shift == 0:
            return logprobs * factor
        moved = logprobs.roll(shift, 0)
        moved[0 if shift > 0 else -1] = math.nan
        return moved

    def is_known(self, count: int) -> torch.Tensor:
        """Report for each of so many tokens whether these log probabilities say what is written there, `(tokens,)`."""
        return self.of(torch.zeros(count)).isfinite()

    def rounding(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Return what rounding to the dtype that they are written in may do to each, of the shape of `logprobs`."""
        dtype = _DTYPES.get(self)
        if dtype is None:
            return torch.zeros_like(logprobs)
        return UNIT_ROUNDOFF[dtype] * logprobs.abs().nan_to_num(0.0, 0.0, 0.0) + HALF_SMALLEST_SUBNORMAL[dtype]


_FACTORS = {Transcription.BASE_2: 1 / math.log(2), Transcription.BASE_10: 1 / math.log(10)}
_SHIFTS = {Transcription.ONE_LATE: 1, Transcription.ONE_EARLY: -1}
_DTYPES = {Transcription.BFLOAT16: "bfloat16", Transcription.FLOAT16: "float16"}
