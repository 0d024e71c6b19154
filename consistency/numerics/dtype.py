"""Properties of dtypes: unit roundoff, subnormals, names and bit patterns."""

from __future__ import annotations

import numpy as np
import torch

from consistency.numerics import rules

UNIT_ROUNDOFF = {getattr(torch, name): u for name, u in rules.UNIT_ROUNDOFF.items()}
"""Unit roundoff by torch dtype."""

HALF_SMALLEST_SUBNORMAL = {getattr(torch, name): u for name, u in rules.HALF_SMALLEST_SUBNORMAL.items()}
"""Half the smallest subnormal by torch dtype."""

_INTEGERS_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_of(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def named(name: str) -> torch.dtype:
    """Return the dtype of a name that `name_of` returns; raise ValueError for any other name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a dtype: {name!r}")
    return dtype


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of real elements: a complex tensor becomes twice as many real ones."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def bit_patterns(flat: torch.Tensor) -> torch.Tensor:
    """View a flat real tensor as integers of the same width (uint8 for one byte, signed for more)."""
    return flat.view(_INTEGERS_BY_SIZE[flat.element_size()])


def elements(flat: torch.Tensor, places: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Return some elements of a flat real tensor, given by indices or by a mask.

    They are moved as bits: torch 2.8 indexes neither 8-bit floats nor unsigned integers of more bits.
    """
    return bit_patterns(flat)[places].view(flat.dtype)
