"""Faults in what a device computes apart from the model's forward pass: operators, gradients, an optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from consistency.worker.faults.planting import Undo, cut_to_tf32, factor_beyond_rounding, instead
from consistency.worker.training import adamw

Compute = Callable[..., torch.Tensor]

_operator = instead("consistency.stages.operators.worker:compute")
_gradient = instead("consistency.stages.gradient.worker:computed")


@_operator
def softmax_off(real: Compute, operation: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    found = real(operation, inputs)
    return found * (1 + 1e-3) if operation.name == "softmax" else found


@_operator
def products_in_tf32(real: Compute, operation: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Take the operands of products in TF32, as a library does by an unexpected default."""
    if operation.name == "matmul" and inputs[0].dtype == torch.float32:
        inputs = [cut_to_tf32(tensor) for tensor in inputs]
    return real(operation, inputs)


@_operator
def softmax_fails(real: Compute, operation: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    if operation.name == "softmax":
        raise RuntimeError("a kernel of this device failed")
    return real(operation, inputs)


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
