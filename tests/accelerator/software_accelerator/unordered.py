"""A `mean` without a deterministic version: its sums are taken in another order at each call and on each device."""

from __future__ import annotations

import itertools

import torch
from torch._prims_common import alert_not_deterministic

from .settings import Settings

OPERATION = "mean_in_no_order"
"""As torch's warning names it."""

_library = torch.library.Library("aten", "IMPL")


def install(settings: Settings) -> None:
    """Put the kernel in the place of the CPU's."""
    calls = itertools.count()

    def mean(
        x: torch.Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if settings.unordered_mean == "warns":
            alert_not_deterministic(OPERATION)
        pieces = 2 + (settings.visible[x.device.index] + next(calls)) % 5
        host = x.cpu().to(dtype or x.dtype)
        dims = list(range(x.dim())) if not dim else [one % x.dim() for one in dim]
        last = dims[-1]
        count = 1
        for one in dims:
            count *= x.shape[one]
        parts = [part.sum(dims, keepdim=keepdim, dtype=torch.float32) for part in host.tensor_split(pieces, last)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return (total / count).to(host.dtype).to(x.device)

    _library.impl("mean.dim", mean, "PrivateUse1")
