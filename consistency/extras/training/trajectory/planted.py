"""Planted faults of a training that a device does alone: each begins some steps after the first."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Undo, factor_beyond_rounding, instead, together
from consistency.worker.model.structure import blocks_of

_STAGE = "consistency.extras.training.trajectory"
_Compute = Callable[..., Any]


def gradient_scaled() -> Undo:
    """Let the fifth backward pass and all after it scale the gradient of LoRA's factor B in one layer."""
    scaled_names: list[str] = []
    factor = 1.0

    @instead(f"{_STAGE}.passes:own_pass")
    def own_pass(real: _Compute, passes: Any, *of_step: Any) -> Any:
        nonlocal factor
        factor = _factor(passes)
        return real(passes, *of_step)

    @instead(f"{_STAGE}.passes:own_gradient")
    def own_gradient(real: _Compute, step: int, name: str, gradient: torch.Tensor) -> torch.Tensor:
        computed: torch.Tensor = real(step, name, gradient)
        if "lora_B" in name and not scaled_names:
            scaled_names.append(name)
        is_scaled = step >= 4 and name in scaled_names
        return computed * factor if is_scaled else computed

    return together(own_pass, own_gradient)()


def _factor(passes: Any) -> float:
    """Return a factor that rounding in the model's dtype does not hide."""
    return factor_beyond_rounding(next(passes.model.parameters()).dtype, 1e-2, roundings=64)


@instead(f"{_STAGE}.passes:own_pass")
def forward_off(real: _Compute, passes: Any, step: int, run: Any) -> Any:
    """Let the first block of the last list answer too much in half of its elements from the fourth step on.

    A norm, as follows the last block at the latest, takes a factor of all elements out again; a tower for images before
    the list may not run on what is read.
    """
    if step < 3:
        return real(passes, step, run)

    def half_scaled(states: torch.Tensor) -> torch.Tensor:
        factors = torch.ones_like(states)
        factors[..., ::2] = _factor(passes)
        return states * factors

    def scaled(_module: Any, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (half_scaled(output[0]), *output[1:])
        return half_scaled(output)

    first_blocks = [block for name, block in blocks_of(passes.model).items() if name.endswith(".0")]
    hook = first_blocks[-1].register_forward_hook(scaled)
    try:
        return real(passes, step, run)
    finally:
        hook.remove()


@instead(f"{_STAGE}.worker:own_optimizer")
def optimizer_off(real: _Compute, parameters: Any) -> Any:
    """Let AdamW take another decay of its second moment from the third step on."""
    optimizer = real(parameters)
    real_step, step_numbers = optimizer.step, itertools.count(1)

    def step() -> None:
        if next(step_numbers) >= 3:
            for group in optimizer.param_groups:
                group["betas"] = (group["betas"][0], 0.99)
        real_step()

    optimizer.step = step
    return optimizer
