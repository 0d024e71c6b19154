"""Count the elements of a tensor that are NaN or infinite: there is no distance to such a value."""

from __future__ import annotations

import torch

_EXPONENT = {
    torch.float64: (torch.int64, 0x7FF << 52),
    torch.float32: (torch.int32, 0xFF << 23),
    torch.bfloat16: (torch.int16, 0xFF << 7),
    torch.float16: (torch.int16, 0x1F << 10),
}
"""The integers of a dtype's size and the bits of its exponent, all of which are set in NaN and infinities alone."""

_AT_ONCE = 1 << 18  # stays in cache, so that memory is read once


def count_not_finite(tensor: torch.Tensor) -> int:
    """Return how many elements of a tensor on the CPU are NaN or infinite; 0 where its dtype has neither."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return sum(map(_count, real.detach().reshape(-1).split(_AT_ONCE)))


def _count(part: torch.Tensor) -> int:
    integers, exponent = _EXPONENT.get(part.dtype, (None, 0))
    if integers is None:  # of one byte: some of these formats have no infinity
        return int((~torch.isfinite(part.to(torch.float32))).sum())
    bits = part.view(integers).bitwise_and(exponent)
    return int((bits == exponent).sum()) if int(bits.max()) == exponent else 0
