"""The only copy of the stage `transfer`: a seam where faults are planted."""

from __future__ import annotations

import torch


def copy(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy a tensor into another of its shape, on any devices, with any strides and dtypes.

    Asynchronous, as `Tensor.to` may be, and for pinned memory too.
    """
    is_pinned = any(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in (source, destination))
    destination.copy_(source, non_blocking=is_pinned)
