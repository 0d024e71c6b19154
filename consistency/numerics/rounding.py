"""Formats through which values may have been rounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from consistency.numerics.words import Word

_MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


@dataclass(frozen=True, slots=True)
class Rounding:
    """One way to cut a number: `how` is `nearest` or `truncated`."""

    word: Word
    how: str
    mantissa: int
    _apply: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values rounded to the format, in their own dtype."""
        return self._apply(values)

    def is_narrower_than(self, dtype: torch.dtype) -> bool:
        """Return whether values of a dtype lose digits by it; TF32 and truncation are considered for float32 only.

        bfloat16 loses none in float16, except for a few very large or small values: that is no sign of a rounding.
        """
        if dtype != torch.float32 and (self.how == "truncated" or self.word == Word.ROUNDED_TO_TF32):
            return False
        return self.mantissa < _MANTISSA.get(dtype, 0)


def _through(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values.to(dtype).to(values.dtype)


def _tf32_nearest(values: torch.Tensor) -> torch.Tensor:
    bits = values.to(torch.float32).view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF  # to even: 10 of 23 mantissa bits remain
    return torch.where(torch.isfinite(values), rounded.view(torch.float32), values.to(torch.float32)).to(values.dtype)


def _truncated(dropped: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: (values.view(torch.int32) & ~((1 << dropped) - 1)).view(torch.float32)


ROUNDINGS = (
    Rounding(Word.ROUNDED_TO_BF16, "nearest", 7, _through(torch.bfloat16)),
    Rounding(Word.ROUNDED_TO_FP16, "nearest", 10, _through(torch.float16)),
    Rounding(Word.ROUNDED_TO_TF32, "nearest", 10, _tf32_nearest),
    Rounding(Word.ROUNDED_TO_BF16, "truncated", 7, _truncated(16)),
    Rounding(Word.ROUNDED_TO_TF32, "truncated", 10, _truncated(13)),
)
"""In the order in which they are tried: fewer mantissa bits first, since the wider formats keep those values too."""
