"""Time all measures of a state dict in which every element differs by rounding, against hand-written comparisons.

    python benchmarks/measures.py

This is the case of a merged weight on another architecture: all elements differ by a few units in the last place. Both
state dicts are in memory. The loop in bug reports takes three measures and `torch.equal`; ours takes eleven. Each
figure is the best of several interleaved rounds, on as many threads as torch uses. With CONSISTENCY_NO_KERNEL set,
NumPy replaces the compiled kernel.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from consistency.numerics.distance import measure
from consistency.numerics.kernels import trust

State = list[tuple[torch.Tensor, torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of one state dict (default 1024)")
    parser.add_argument("--tensors", type=int, default=200, help="how many tensors it has (default 200)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: as many as torch uses")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    size = arguments.mib * 2**20 // arguments.tensors // 4
    state = [_pair(size, seed) for seed in range(arguments.tensors)]
    jobs: dict[str, Callable[[], object]] = {
        "consistency, all measures": lambda: [measure(a, e) for a, e in state],
        "the reporters' loop": lambda: _loop(state),
        "assert_close": lambda: _assert_close(state),
    }
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(arguments.rounds):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            best[name] = min(best[name], time.perf_counter() - start)
    total = sum(e.nbytes for _, e in state)
    ours = best["consistency, all measures"]
    print(f"{total / 2**20:.0f} MiB in {len(state)} float32 tensors, {torch.get_num_threads()} threads, all differ")
    print(f"measures by {trust.state()}")
    print(f"{'':28}{'s':>8}{'GB/s':>8}{'over ours':>12}")
    for name, seconds in best.items():
        print(f"{name:28}{seconds:8.2f}{total / seconds / 1e9:8.2f}{seconds / ours:12.2f}")


def _pair(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    expected = rng.standard_normal(size, dtype=np.float32) * np.float32(0.02)
    steps = rng.integers(1, 4, size) * rng.choice([-1, 1], size)
    actual = expected * (1 + steps * 2.0**-23).astype(np.float32)
    return torch.from_numpy(actual), torch.from_numpy(expected)


def _loop(state: State) -> None:
    for a, e in state:
        difference = a - e
        difference.abs().max().item(), difference.abs().mean().item(), (difference**2).mean().item(), torch.equal(a, e)


def _assert_close(state: State) -> None:
    for a, e in state:
        torch.testing.assert_close(a, e)


if __name__ == "__main__":
    main()
