"""Faults in the base, after transformers has loaded it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, Undo, replace


def _in_base(change: Callable[[torch.nn.Module], None]) -> Install:
    """Change the base after transformers has loaded it."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            model, missing = real(*args, **kwargs)
            with torch.no_grad():
                change(model)
            return model, missing

        return load

    def install() -> Undo:
        from consistency.worker.model import loading

        return replace(loading, "_from_folder", wrap)

    return install


def _base_through_bfloat16(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))


def _base_bit(model: torch.nn.Module) -> None:
    weight = max(model.parameters(), key=lambda p: p.numel())
    weight.reshape(-1)[7:8].view(torch.uint8)[0] ^= 1


FAULTS: dict[str, Install] = {
    "base-bit-flip": _in_base(_base_bit),
    "base-through-bfloat16": _in_base(_base_through_bfloat16),
}
