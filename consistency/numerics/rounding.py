"""Formats that numbers may have been cut to on their way, and what that makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# explicit mantissa and exponent bits of each format
_BITS = {
    torch.float64: (52, 11),
    torch.float32: (23, 8),
    torch.float16: (10, 5),
    torch.bfloat16: (7, 8),
}


@dataclass(frozen=True, slots=True)
class Rounding:
    """One way to cut a number: `name` as in `rounded-to-bf16`, `how` is `nearest` or `truncated`."""

    name: str
    how: str
    mantissa: int
    exponent: int
    _apply: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers cut to the format, in the dtype that they have."""
        return self._apply(values)

    def is_narrower_than(self, dtype: torch.dtype) -> bool:
        """Tell whether numbers of a dtype lose something by it; truncating is told of float32 alone."""
        if dtype not in _BITS or (self.how == "truncated" and dtype != torch.float32):
            return False
        mantissa, exponent = _BITS[dtype]
        return self.mantissa < mantissa or self.exponent < exponent


def _through(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values.to(dtype).to(values.dtype)


def _tf32_nearest(values: torch.Tensor) -> torch.Tensor:
    bits = values.to(torch.float32).view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF  # to even: of 23 mantissa bits 10 stay
    return torch.where(torch.isfinite(values), rounded.view(torch.float32), values.to(torch.float32)).to(values.dtype)


def _truncated(dropped: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: (values.view(torch.int32) & ~((1 << dropped) - 1)).view(torch.float32)


ROUNDINGS = (
    Rounding("bf16", "nearest", 7, 8, _through(torch.bfloat16)),
    Rounding("fp16", "nearest", 10, 5, _through(torch.float16)),
    Rounding("tf32", "nearest", 10, 8, _tf32_nearest),
    Rounding("bf16", "truncated", 7, 8, _truncated(16)),
    Rounding("tf32", "truncated", 10, 8, _truncated(13)),
)
"""In the order in which they are tried: what has fewer mantissa bits first, for it is what the others keep too."""
