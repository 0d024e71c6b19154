"""One step of AdamW: as torch does it, and its exact value with what a device may be off.

The step divides a gradient by its own magnitude, so its result depends on the gradient's sign where that is near zero:
no bound on a gradient's error holds the parameter that comes of it. Given the gradient's bytes it is well conditioned.
So it is held against the step in float64 from the very bytes that this device gave to its optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from consistency.numerics.running_error import Tracked

LEARNING_RATE, WEIGHT_DECAY, EPSILON = 1e-3, 1e-2, 1e-8
BETAS = (0.9, 0.999)
"""The defaults of `torch.optim.AdamW`, written down so that a change of those is no change of what is looked at."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What the optimizer has kept of earlier steps: the means of gradients and of their squares, and how many."""

    first: torch.Tensor
    second: torch.Tensor
    steps: int


def step(parameter: torch.Tensor, gradient: torch.Tensor, moments: Moments | None = None) -> torch.Tensor:
    """Return what AdamW makes of a parameter, which stays as it is; without moments it is the first step."""
    new = torch.nn.Parameter(parameter.detach().clone())
    new.grad = gradient.detach().clone()
    # one plain operation after the other: what fused and batched kernels do differs by backend and is not written down
    optimizer = torch.optim.AdamW(
        [new], lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, foreach=False, fused=False
    )
    if moments is not None:
        optimizer.state[new] = {
            "step": torch.tensor(float(moments.steps)),
            "exp_avg": moments.first.clone(),
            "exp_avg_sq": moments.second.clone(),
        }
    optimizer.step()
    return new.detach()


def exact_step(
    parameter: Tracked,
    gradient: Tracked,
    first: Tracked | None = None,
    second: Tracked | None = None,
    *,
    steps: int = 0,
) -> Tracked:
    """Return the exact result of `step`, and what each element may be off; moments of earlier steps, if any."""
    of, (beta1, beta2) = parameter.by, BETAS

    def rounded(number: float) -> Tracked:
        return of.constant(number).store()

    decayed = (parameter * rounded(1 - LEARNING_RATE * WEIGHT_DECAY)).store()
    grown = (gradient - first).store() if first is not None else gradient
    mean = (grown * rounded(1 - beta1)).store()
    mean = (first + mean).store() if first is not None else mean
    square = ((gradient * gradient).store() * rounded(1 - beta2)).store()
    square = ((second * rounded(beta2)).store() + square).store() if second is not None else square
    root = (square.sqrt().store() / rounded((1 - beta2 ** (steps + 1)) ** 0.5)).store()
    size = (root + rounded(EPSILON)).store()
    change = ((rounded(-LEARNING_RATE / (1 - beta1 ** (steps + 1))) * mean).store() / size).store()
    return (decayed + change).store()
