"""The planted faults of the stage `gradient`, in gradients and in the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from consistency.worker.faults.planting import Undo, factor_beyond_rounding, instead
from consistency.worker.training import adamw

Gradients = dict[str, torch.Tensor]
Compute = Callable[..., torch.Tensor]

_gradient = instead("consistency.stages.gradient.worker:computed")


@instead("consistency.stages.gradient.worker:gradients_of")
def gradients_off(real: Callable[..., Gradients], backward: Any, *args: Any) -> Gradients:
    """Multiply all gradients by a factor that no rounding explains."""
    factor = factor_beyond_rounding(next(backward.model.parameters()).dtype, 1e-3)
    return {name: gradient * factor for name, gradient in real(backward, *args).items()}


def one_layer_lost() -> Undo:
    """Replace the gradients of LoRA's factors B in block 0 by zeros; without LoRA, the gradient that comes first."""
    first: list[str] = []

    @_gradient
    def computed(real: Compute, name: str, gradient: torch.Tensor) -> torch.Tensor:
        value = real(name, gradient)
        if "lora_" not in name and not first:
            first.append(name)
        is_b_of_block_0 = "lora_B" in name and ".0." in name
        is_lost = name in first or is_b_of_block_0
        return torch.zeros_like(value) if is_lost else value

    return computed()


@instead("consistency.stages.gradient.optimizer_step:stepped")
def step_off(real: Compute, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Let the optimizer go a thousandth too far."""
    with mock.patch.object(adamw, "LEARNING_RATE", adamw.LEARNING_RATE * 1.001):
        return real(parameter, gradient)
