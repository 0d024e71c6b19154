"""Products of a mixture of experts, in dtypes that torch's grouped kernel does not take."""

from __future__ import annotations

from typing import Any

import torch

GROUPED = torch.ops.aten._grouped_mm.default
"""Multiplies groups of rows or columns, each by a matrix of its own: `offs` has the end of each group."""


def grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Return what `torch.ops.aten._grouped_mm` does, one product per group; rows of no group are zero.

    Parameters
    ----------
    a, b : torch.Tensor
        `(groups, m, k)` and `(groups, k, n)`; where one has no first dimension, `offs` divides its rows (of `b`, its
        columns) into groups; where neither has, it divides the dimension that is summed.
    """
    if offs is None:
        return _as(a @ b, bias, out_dtype)
    ends = offs.tolist()
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if a.dim() == 2 and b.dim() == 2:
        return _as(torch.stack([a[:, part] @ b[part] for part in parts]), bias, out_dtype)
    if a.dim() == 2:
        found = a.new_zeros(a.shape[0], b.shape[-1])
        for group, part in enumerate(parts):
            found[part] = a[part] @ b[group]
        return _as(found, bias, out_dtype)
    found = b.new_zeros(a.shape[1], b.shape[-1])
    for group, part in enumerate(parts):
        found[:, part] = a[group] @ b[:, part]
    return _as(found, bias, out_dtype)


def _as(found: torch.Tensor, bias: Any, dtype: Any) -> torch.Tensor:
    found = found if bias is None else found + bias
    return found if dtype is None else found.to(dtype)
