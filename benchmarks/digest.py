"""Time the digest against copying the same bytes, on one core.

    python benchmarks/digest.py

Prints the rate of `consistency.numerics.digest.digest` over a state dict as GB/s, and as a share of the rate at which
the same bytes are copied: the faster of torch's `copy_` and NumPy's `copyto`. Each is the best of several
interleaved rounds, so that a busy machine slows all of them. With CONSISTENCY_NO_KERNEL set, NumPy replaces the
compiled kernel.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from consistency.numerics.digest import digest
from consistency.numerics.kernels import trust


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state dict (default 1024)")
    parser.add_argument("--tensors", type=int, default=200, help="how many tensors it has (default 200)")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = arguments.mib * 2**20 // arguments.tensors // 4
    rng = np.random.default_rng(0)
    source = [torch.from_numpy(rng.standard_normal(size, dtype=np.float32)) for _ in range(arguments.tensors)]
    target = [torch.zeros_like(t) for t in source]
    total = sum(t.nbytes for t in source)
    print(f"{total / 2**20:.0f} MiB in {len(source)} float32 tensors, one thread, best of {arguments.rounds} rounds")
    print(f"digests by {trust.state()}")
    print(f"{'':28}{'GB/s':>8}{'of a copy':>12}")
    jobs: dict[str, Callable[[], object]] = {
        "torch copy_": lambda: [t.copy_(s) for s, t in zip(source, target, strict=True)],
        "numpy copyto": lambda: _copy(source, target),
        "torch.equal": lambda: [torch.equal(s, t) for s, t in zip(source, target, strict=True)],
        "digest": lambda: [digest(s) for s in source],
        "digest, bfloat16 view": lambda: [digest(s.view(torch.bfloat16)) for s in source],
        "digest, unaligned by 1": lambda: [digest(s.view(torch.uint8)[1:]) for s in source],
    }
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(arguments.rounds):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            best[name] = min(best[name], time.perf_counter() - start)
    copy = min(best["torch copy_"], best["numpy copyto"])
    for name, seconds in best.items():
        print(f"{name:28}{total / seconds / 1e9:8.2f}{copy / seconds:11.0%}")


def _copy(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
    for s, t in zip(source, target, strict=True):
        np.copyto(t.numpy(), s.numpy())


if __name__ == "__main__":
    main()
