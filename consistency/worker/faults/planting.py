"""How a fault gets into a process: a function that is going to be called is replaced by one that goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Undo = Callable[[], None]
Install = Callable[[], Undo]


def replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Undo:
    """Replace a function by one that calls it."""
    kept = vars(owner)[name]
    setattr(owner, name, wrap(getattr(owner, name)))
    return lambda: setattr(owner, name, kept)


def cut_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Cut float32 numbers as a unit does that takes its operands in TF32."""
    return (tensor.view(torch.int32) & ~0x1FFF).view(torch.float32)  # 10 of 23 mantissa bits stay
