"""Measure block digests on a GPU, beside a copy of the same tensors on the device.

    python benchmarks/digest_gpu.py

For each set of tensors and each path (the fused kernel, plain torch) it prints bytes digested per second, bytes copied
per second by `copy_`, and their ratio. A copy reads and writes every byte, a digest reads it, so a ratio above 1 is
possible; 0.6 is what the kernel is meant to reach. Times are the best of five, by the host's clock, for a digest ends
there: where tensors are small, it is the host's share per tensor that is measured.

Not one figure of it has been taken yet: it was written where there is no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from consistency.numerics.digest import block_digests
from consistency.numerics.kernels import triton_digest

REPEATS = 5
MIB = 1 << 20


def one_large(device: torch.device) -> list[torch.Tensor]:
    """Return 1 GiB of float32."""
    return [torch.randn(1 << 28, device=device)]


def like_7b(device: torch.device) -> list[torch.Tensor]:
    """Return 291 bfloat16 tensors of a 7B Llama's shapes, 12.6 GiB."""
    hidden, inner, layers, vocabulary = 4096, 11008, 32, 32000
    layer = [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner)] + [(hidden,)] * 2
    shapes = [(vocabulary, hidden)] * 2 + layer * layers + [(hidden,)]
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]


def small(device: torch.device) -> list[torch.Tensor]:
    """Return 256 tensors of an adapter's size, (8, 4096) float32: 128 KiB each, which never go to the kernel."""
    return [torch.randn(8, 4096, device=device) for _ in range(256)]


def middling(device: torch.device) -> list[torch.Tensor]:
    """Return 32 tensors of 16 MiB, the smallest that go to the kernel."""
    return [torch.randn(16 * MIB // 4, device=device) for _ in range(32)]


SETS: tuple[Callable[[torch.device], list[torch.Tensor]], ...] = (one_large, like_7b, middling, small)


def best_of(action: Callable[[], object]) -> float:
    """Return the seconds of the fastest of `REPEATS`, after one that does not count."""
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


@contextmanager
def plain_path(device: torch.device) -> Iterator[None]:
    """Make this process take the plain path."""
    before = dict(triton_digest._states)
    triton_digest._states[device] = "plain: measured"
    try:
        yield
    finally:
        triton_digest._states.clear()
        triton_digest._states.update(before)


def digest_all(tensors: Sequence[torch.Tensor]) -> None:
    """Digest one tensor after the other, as a worker does."""
    for tensor in tensors:
        block_digests(tensor)


def copy_all(tensors: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Copy one tensor after the other within the device."""
    for tensor in tensors:
        target[: tensor.numel()].copy_(tensor.view(-1))


def measure(device: torch.device) -> None:
    """Print what the first digest costs, then lines for each set."""
    started = time.perf_counter()
    block_digests(torch.ones(64 * MIB, device=device))
    first = time.perf_counter() - started
    print(f"{torch.cuda.get_device_name(device)} · torch {torch.__version__} · {triton_digest.state(device)}")
    print(f"first digest, with compilation and check: {first:.2f} s")
    print(f"{'set':12}{'path':8}{'MiB':>8}{'digest GB/s':>13}{'copy GB/s':>11}{'ratio':>7}")
    for make in SETS:
        try:
            measure_set(make.__name__, make(device), device)
        except torch.OutOfMemoryError:
            print(f"{make.__name__:12}skipped: it does not fit the device's free memory")
        torch.cuda.empty_cache()


def measure_set(name: str, tensors: list[torch.Tensor], device: torch.device) -> None:
    """Print a line per path."""
    target = torch.empty(max(t.numel() for t in tensors), dtype=tensors[0].dtype, device=device)
    size = sum(t.nbytes for t in tensors)
    copied = size / best_of(lambda: copy_all(tensors, target)) / 1e9
    seconds = {}
    if triton_digest.state(device) == triton_digest.FUSED:
        seconds["fused"] = best_of(lambda: digest_all(tensors))
    with plain_path(device):
        seconds["plain"] = best_of(lambda: digest_all(tensors))
    for path, taken in seconds.items():
        rate = size / taken / 1e9
        print(f"{name:12}{path:8}{size / MIB:8.0f}{rate:13.1f}{copied:11.1f}{rate / copied:7.2f}")


if __name__ == "__main__":
    if torch.cuda.is_available():
        measure(torch.device("cuda", torch.cuda.current_device()))
    else:
        print("skipped: there is no CUDA device here, and the rates of a CPU say nothing about one")
