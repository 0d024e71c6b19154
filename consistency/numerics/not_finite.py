"""Count the elements of a tensor that are NaN or infinite: there is no distance to such a value."""

from __future__ import annotations

import torch

from consistency.numerics.digest import as_bytes
from consistency.numerics.dtype import name_of
from consistency.numerics.not_finite_bits import count_in_bits

_AT_ONCE = 1 << 18
"""Elements that are looked at at once: they stay in cache, so that memory is read once."""


def count_not_finite(tensor: torch.Tensor) -> int:
    """Return how many elements of a tensor on the CPU are NaN or infinite; 0 where its dtype has neither."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return sum(map(_count_in_part, real.detach().reshape(-1).split(_AT_ONCE)))


def _count_in_part(part: torch.Tensor) -> int:
    if part.element_size() == 1:  # some of these formats have no infinity
        return int((~torch.isfinite(part.to(torch.float32))).sum())
    return count_in_bits(as_bytes(part).numpy(), name_of(part.dtype))
