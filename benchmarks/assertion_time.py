"""Measure what `consistency.testing` takes, beside the function's own time.

    python -m benchmarks.assertion_time

All are times of one core, the least of some runs: values alone beside a call of the function, values and gradients
beside a call with its backward pass. Last, what the first assertion of a process takes after `import torch`.
"""

from __future__ import annotations

import subprocess
import sys
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


def recurrence(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Compute gated linear attention step by step, as references of chunked kernels do."""
    state = torch.zeros(q.shape[0], q.shape[-1], v.shape[-1], dtype=torch.float32)
    outputs = []
    for step in range(q.shape[1]):
        decay = gate[:, step].float().exp()[:, :, None]
        state = state * decay + k[:, step, :, None].float() * v[:, step, None].float()
        outputs.append((q[:, step, :, None].float() * state).sum(1))
    return torch.stack(outputs, 1).to(q.dtype)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "two products, 16 × 1024 × 1024": (mlp, (torch.randn(16, 1024), torch.randn(1024, 1024), torch.randn(1024, 1024))),
    "two products, 64 × 512 × 512": (mlp, (torch.randn(64, 512), torch.randn(512, 512), torch.randn(512, 512))),
    "attention, 8 × 128 × 64": (torch.nn.functional.scaled_dot_product_attention, (torch.randn(1, 8, 128, 64),) * 3),
    "norm, 256 × 1024": (norm, (torch.randn(256, 1024), torch.randn(1024))),
    "norm, 4 × 64": (norm, (torch.randn(4, 64), torch.randn(64))),
    "recurrence of 256 steps, 2 × 16 × 16": (
        recurrence,
        (torch.randn(2, 256, 16), torch.randn(2, 256, 16), torch.randn(2, 256, 16), -torch.rand(2, 256, 16)),
    ),
}

_FIRST = """
import time, torch
torch.set_num_threads(1)
start, processor_start = time.perf_counter(), time.process_time()
from consistency.testing import assert_within_rounding
x, weight = torch.randn(4, 64), torch.randn(64)
assert_within_rounding(lambda x, weight: torch.nn.functional.rms_norm(x, (64,), weight), x, weight)
print(time.perf_counter() - start, time.process_time() - processor_start)
"""


def main() -> None:
    torch.set_num_threads(1)
    print("| function | its time | values | with gradients | values and gradients |\n|---|---|---|---|---|")
    for name, (function, inputs) in FUNCTIONS.items():
        print(f"| {name} | {' | '.join(cells(function, inputs))} |", flush=True)
    wall, processor = min(first_assertion() for _ in range(3))
    print(
        f"\nThe first assertion of a process, after `import torch`: {wall:.1f} s, {processor:.1f} s of processor time."
    )


def first_assertion() -> tuple[float, float]:
    """Return the seconds that the first assertion of a new process takes, of the clock and of the processor."""
    done = subprocess.run([sys.executable, "-P", "-c", _FIRST], capture_output=True, text=True, check=True)
    wall, processor = map(float, done.stdout.split())
    return wall, processor


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
