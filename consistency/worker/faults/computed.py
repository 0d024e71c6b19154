"""Faults in what a device computes: the delta, the merge, the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, Undo, cut_to_tf32, replace

Tensors = dict[str, torch.Tensor]


def _in_delta(change: Callable[[torch.Tensor], torch.Tensor]) -> Install:
    """Change what PEFT computes as the delta of a linear layer."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def delta(self: Any, adapter: str) -> torch.Tensor:
            return change(real(self, adapter))

        return delta

    def install() -> Undo:
        from peft.tuners.lora.layer import Linear

        return replace(Linear, "get_delta_weight", wrap)

    return install


def _in_activations(change: Callable[[Tensors], Tensors]) -> Install:
    """Change what the forward pass gives, and nothing before it."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Tensors]:
        def activations(*args: Any, **kwargs: Any) -> Tensors:
            return change(real(*args, **kwargs))

        return activations

    def install() -> Undo:
        from consistency.worker.stages import forward

        return replace(forward, "activations", wrap)

    return install


def _in_merge(change: Callable[[torch.Tensor], None]) -> Install:
    """Change what a merge has left in a linear layer's weight."""

    def wrap(real: Callable[..., Any]) -> Callable[..., None]:
        def merge(self: Any, *args: Any, **kwargs: Any) -> None:
            real(self, *args, **kwargs)
            with torch.no_grad():
                change(self.get_base_layer().weight)

        return merge

    def install() -> Undo:
        from peft.tuners.lora.layer import Linear

        return replace(Linear, "merge", wrap)

    return install


def _products_in_tf32() -> Undo:
    """Let the delta's product run as on a unit that cuts its operands to TF32."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def delta(self: Any, adapter: str) -> torch.Tensor:
            factors = [self.lora_A[adapter].weight, self.lora_B[adapter].weight]
            kept = [factor.data for factor in factors]
            for factor in factors:
                factor.data = cut_to_tf32(factor.data)
            try:
                found: torch.Tensor = real(self, adapter)
                return found
            finally:
                for factor, data in zip(factors, kept, strict=True):
                    factor.data = data

        return delta

    from peft.tuners.lora.layer import Linear

    return replace(Linear, "get_delta_weight", wrap)


def _one_bit_of_weight(weight: torch.Tensor) -> None:
    weight.view(torch.int32)[3, 5] ^= 1 << 27


_calls = 0


def _flaky(delta: torch.Tensor) -> torch.Tensor:
    global _calls
    _calls += 1
    return delta * (1 + 2**-23 * (_calls % 2))


def _kernel_fails(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a kernel of this device failed")


def _operator_fails(_: Tensors) -> Tensors:
    raise RuntimeError("an operator of this device failed")


FAULTS: dict[str, Install] = {
    "merge-bit-flip": _in_merge(_one_bit_of_weight),
    "merge-in-tf32": _products_in_tf32,
    "merge-zeros": _in_delta(torch.zeros_like),
    "merge-off": _in_delta(lambda delta: delta * 1.001),
    "merge-fails": _in_delta(_kernel_fails),
    "forward-off": _in_activations(lambda found: {name: tensor * (1 + 1e-4) for name, tensor in found.items()}),
    "forward-fails": _in_activations(_operator_fails),
    "merge-not-repeatable": _in_delta(_flaky),
}
