"""Faults in what a device computes without a model, and on the way back through one: operators, gradients, a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, Undo, cut_to_tf32, replace

Tensors = dict[str, torch.Tensor]


def _in_operator(change: Callable[[Any, Callable[..., torch.Tensor], list[torch.Tensor]], torch.Tensor]) -> Install:
    """Change what an operation of the stage `operators` gives: called with it, the real road, and the inputs."""

    def wrap(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda operation, inputs: change(operation, real, inputs)

    def install() -> Undo:
        from consistency.worker.stages.operators import stage as operators

        return replace(operators, "compute", wrap)

    return install


def _off(operation: Any, real: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> torch.Tensor:
    found = real(operation, inputs)
    return found * (1 + 1e-3) if operation.name == "softmax" else found


def _products_in_tf32(operation: Any, real: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> torch.Tensor:
    """Let a unit take the operands of products in TF32, as a library does whose switch nobody thought of."""
    if operation.name == "matmul" and inputs[0].dtype == torch.float32:
        inputs = [cut_to_tf32(tensor) for tensor in inputs]
    return real(operation, inputs)


def _fails(operation: Any, real: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> torch.Tensor:
    if operation.name == "softmax":
        raise RuntimeError("a kernel of this device failed")
    return real(operation, inputs)


def _in_gradients(change: Callable[[Tensors], Tensors]) -> Install:
    """Change what comes back through the model, and nothing before it."""

    def wrap(real: Callable[..., Tensors]) -> Callable[..., Tensors]:
        return lambda *args: change(real(*args))

    def install() -> Undo:
        from consistency.worker.stages.gradient import stage as gradient

        return replace(gradient, "gradients", wrap)

    return install


def _one_layer_lost(found: Tensors) -> Tensors:
    name = next(name for name in found if "lora_B" in name)
    return found | {name: torch.zeros_like(found[name])}


def _step_off() -> Undo:
    """Let the optimizer go a thousandth too far."""

    def wrap(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def stepped(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
            return torch.lerp(parameter.detach(), real(parameter, gradient), 1.001)

        return stepped

    from consistency.worker.stages.gradient import stage as gradient

    return replace(gradient, "stepped", wrap)


FAULTS: dict[str, Install] = {
    "operator-off": _in_operator(_off),
    "operator-in-tf32": _in_operator(_products_in_tf32),
    "operator-fails": _in_operator(_fails),
    "gradient-off": _in_gradients(lambda found: {name: tensor * 1.001 for name, tensor in found.items()}),
    "gradient-zeros": _in_gradients(_one_layer_lost),
    "optimizer-off": _step_off,
}
