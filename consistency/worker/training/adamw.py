"""Compute one step of AdamW as torch does, and its exact value with the allowed error.

The step divides a gradient by its own magnitude, so near zero its result depends on the gradient's sign: no bound on
the gradient's error bounds the resulting parameter. Given the gradient's bytes the step is well conditioned, so it is
compared with the step in float64 from the bytes that this device gave to its optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from consistency.numerics.running_error import Tracked

LEARNING_RATE, WEIGHT_DECAY, EPSILON = 1e-3, 1e-2, 1e-8
BETAS = (0.9, 0.999)
"""The defaults of `torch.optim.AdamW`, fixed so that a change of those does not change what is checked."""


@dataclass(frozen=True, slots=True)
class Moments:
    """The optimizer's state: the running means of gradients and of their squares, and the number of steps."""

    first: torch.Tensor
    second: torch.Tensor
    steps: int


def step(parameter: torch.Tensor, gradient: torch.Tensor, moments: Moments | None = None) -> torch.Tensor:
    """Return the value of a parameter after a step of AdamW; the parameter itself is unchanged.

    Without moments it is the first step.
    """
    new = torch.nn.Parameter(parameter.detach().clone())
    new.grad = gradient.detach().clone()
    optimizer = optimizer_of([new])
    if moments is not None:
        optimizer.state[new] = {
            "step": torch.tensor(float(moments.steps)),
            "exp_avg": moments.first.clone(),
            "exp_avg_sq": moments.second.clone(),
        }
    optimizer.step()
    return new.detach()


@dataclass(frozen=True, slots=True)
class ExactState:
    """Exact values of a parameter and of the optimizer's state for it, with the errors that a device may make."""

    parameter: Tracked
    first: Tracked | None = None
    second: Tracked | None = None
    steps: int = 0

    def after(self, gradient: Tracked) -> ExactState:
        """Return the state after one more step, in the order of torch's own operations."""
        arithmetic, (beta1, beta2) = self.parameter.by, BETAS

        def rounded(number: float) -> Tracked:
            return arithmetic.constant(number).store()

        first, second, steps = self.first, self.second, self.steps + 1
        decayed = (self.parameter * rounded(1 - LEARNING_RATE * WEIGHT_DECAY)).store()
        # the mean moves toward the gradient by a part of their distance (`lerp_`); it begins at zero
        distance = (gradient - first).store() if first is not None else gradient
        mean = (distance * rounded(1 - beta1)).store()
        if first is not None:
            mean = (first + mean).store()
        square = ((gradient * gradient).store() * rounded(1 - beta2)).store()
        if second is not None:
            square = ((second * rounded(beta2)).store() + square).store()
        root = (square.sqrt().store() / rounded((1 - beta2**steps) ** 0.5)).store()
        size = (root + rounded(EPSILON)).store()
        change = ((rounded(-LEARNING_RATE / (1 - beta1**steps)) * mean).store() / size).store()
        return ExactState((decayed + change).store(), mean, square, steps)


def exact_step(
    parameter: Tracked,
    gradient: Tracked,
    first: Tracked | None = None,
    second: Tracked | None = None,
    *,
    steps: int = 0,
) -> Tracked:
    """Return the exact result of `step` with each element's allowed error; moments of earlier steps, if any."""
    return ExactState(parameter, first, second, steps).after(gradient).parameter


def optimizer_of(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
    """Return the optimizer, which computes one plain operation after the other.

    Fused and batched kernels differ by backend and are not documented.
    """
    return torch.optim.AdamW(
        list(parameters),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=WEIGHT_DECAY,
        foreach=False,
        fused=False,
    )
