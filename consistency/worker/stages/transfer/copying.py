"""The one place where the stage `transfer` copies: a seam, so that a fault can be put in it and nowhere else."""

from __future__ import annotations

import torch


def copy(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy a tensor into another of its shape, on whatever devices, of whatever strides and dtypes the two are.

    It returns when the copy is on its way, as `Tensor.to` does.
    """
    destination.copy_(source)
