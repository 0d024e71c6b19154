"""What the faults of the stage `gradient` do: to gradients, and to the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from consistency.worker.faults.planting import Undo, factor_beyond_rounding, instead
from consistency.worker.training import adamw

Compute = Callable[..., torch.Tensor]

_gradient = instead("consistency.stages.gradient.worker:computed")


@instead("consistency.stages.gradient.worker:gradients_of")
def gradients_off(real: Callable[..., dict[str, torch.Tensor]], of: Any, *given: Any) -> dict[str, torch.Tensor]:
    factor = factor_beyond_rounding(next(of.model.parameters()).dtype, 1e-3)
    return {name: gradient * factor for name, gradient in real(of, *given).items()}


def one_layer_lost() -> Undo:
    """Lose the gradients of LoRA's factors B in block 0; of another method, that of the parameter that comes first."""
    first: list[str] = []

    @_gradient
    def computed(real: Compute, name: str, gradient: torch.Tensor) -> torch.Tensor:
        found = real(name, gradient)
        if "lora_" not in name:
            first[:] = first or [name]
        lost = name in first or ("lora_B" in name and ".0." in name)
        return torch.zeros_like(found) if lost else found

    return computed()


@instead("consistency.stages.gradient.optimizer_step:stepped")
def step_off(real: Compute, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Let the optimizer go a thousandth too far."""
    with mock.patch.object(adamw, "LEARNING_RATE", adamw.LEARNING_RATE * 1.001):
        return real(parameter, gradient)
