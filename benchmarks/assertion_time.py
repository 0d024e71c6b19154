"""Measure what `consistency.testing` takes, as a multiple of the function's own time.

    python -m benchmarks.assertion_time

Both are times of one core, the least of some runs: values alone over a call of the function, values and gradients over
a call with its backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from consistency.testing import within_rounding


def least(function: Callable[[], Any], runs: int) -> float:
    """Return the least time of the process, in milliseconds."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return 1000 * min(times)


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.nn.functional.silu(x @ up) @ down


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "two products, 16 × 1024 × 1024": (mlp, (torch.randn(16, 1024), torch.randn(1024, 1024), torch.randn(1024, 1024))),
    "two products, 64 × 512 × 512": (mlp, (torch.randn(64, 512), torch.randn(512, 512), torch.randn(512, 512))),
    "attention, 8 × 128 × 64": (torch.nn.functional.scaled_dot_product_attention, (torch.randn(1, 8, 128, 64),) * 3),
    "norm, 256 × 1024": (norm, (torch.randn(256, 1024), torch.randn(1024))),
}


def main() -> None:
    torch.set_num_threads(1)
    print("| function | its time | values | with gradients | values and gradients |\n|---|---|---|---|---|")
    for name, (function, inputs) in FUNCTIONS.items():
        print(f"| {name} | {' | '.join(cells(function, inputs))} |", flush=True)


def cells(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[str]:
    """Return the cells of a row."""
    within_rounding(function, *inputs)
    leaves = [one.clone().requires_grad_() for one in inputs]
    return [
        f"{least(lambda: function(*inputs), 20):.2g} ms",
        f"{least(lambda: within_rounding(function, *inputs, gradients=False), 4):.0f} ms",
        f"{least(lambda: torch.autograd.grad(function(*leaves).sum(), leaves), 20):.2g} ms",
        f"{least(lambda: within_rounding(function, *inputs), 3):.0f} ms",
    ]


if __name__ == "__main__":
    main()
