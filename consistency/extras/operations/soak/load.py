"""Keep a device busy with matrix products in a thread, so that it runs hot while others compute on it.

The load has its own generator, buffers and, on an accelerator, stream; no setting of torch is changed. On the CPU NumPy
computes it, on one thread, because torch would give each thread as many more as the worker has.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from consistency.capture.soak import Load
from consistency.errors import first_line
from consistency.extras.operations.soak.step import CPU_BATCH, CPU_SIDE, LARGEST_SIDE, SHARE
from consistency.worker.device_error import is_of_the_device, is_out_of_memory
from consistency.worker.memory.host_memory import free_bytes

_SEED = 2522

_SMALLEST_SIDE = 512
_FULL_S = 0.002
"""Sides are doubled until a product takes this long: 50 times what it takes to launch one, so a GPU has no idle time
between them, and yet other work waits for no more than a few products. 8192 fill any device."""

_QUEUED = 4  # products queued before the thread waits for them

_MILLION = 10**6


class Busy:
    """The products of one device, as they are counted."""

    def __init__(self) -> None:
        self.size = ""
        self.error: str | None = None
        self.of_the_device: Exception | None = None
        self.products = 0
        self.began_s = time.monotonic()

    def summary(self) -> Load:
        took_s = max(time.monotonic() - self.began_s, 1 / _MILLION)
        rate = float(f"{self.products / took_s:.4g}")
        return Load(size=self.size, products=self.products, products_per_s=rate, error=self.error)


@contextmanager
def busy(device: torch.device) -> Iterator[Busy]:
    """Keep a device busy; it has begun on entry.

    A load that fails ends, and says why. An error of the device, but for memory, is raised at the end.
    """
    state, stop, begun = Busy(), threading.Event(), threading.Event()
    thread = threading.Thread(target=_work, args=(device, state, begun, stop), name="load", daemon=True)
    thread.start()
    begun.wait()
    try:
        yield state
    finally:
        stop.set()
        thread.join()
    if state.of_the_device is not None:
        raise state.of_the_device


def _work(device: torch.device, state: Busy, begun: threading.Event, stop: threading.Event) -> None:
    try:
        multiply = _on_cpu(state) if device.type == "cpu" else _on_device(device, state)
        state.began_s = time.monotonic()
        while not stop.is_set():
            state.products += multiply()
            begun.set()
    except (RuntimeError, MemoryError) as error:
        state.error = f"the load ended: {first_line(error)}"
        if not is_out_of_memory(error) and is_of_the_device(error, device):
            state.of_the_device = error
    finally:
        begun.set()


def _on_cpu(state: Busy) -> Callable[[], int]:
    generator = np.random.Generator(np.random.PCG64(_SEED))
    shape = (CPU_BATCH, CPU_SIDE, CPU_SIDE)
    a, b = (generator.standard_normal(shape, dtype=np.float32) for _ in range(2))
    c = np.empty(shape, np.float32)
    state.size = f"{CPU_SIDE} × {CPU_SIDE} float32, one thread"

    def multiply() -> int:
        np.matmul(a, b, out=c)
        return CPU_BATCH

    return multiply


def _on_device(device: torch.device, state: Busy) -> Callable[[], int]:
    module: Any = torch.get_device_module(device.type)
    stream = module.Stream(device=device) if hasattr(module, "Stream") and hasattr(module, "stream") else None

    def inside() -> Any:
        return nullcontext() if stream is None else module.stream(stream)

    def wait() -> None:
        if stream is not None and hasattr(stream, "synchronize"):
            stream.synchronize()
        else:
            module.synchronize()

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # tensor cores draw most
    free = free_bytes(device)
    largest = LARGEST_SIDE if free is None else math.isqrt(free // (SHARE * 3 * dtype.itemsize))
    side = min(_SMALLEST_SIDE, 1 << max(0, largest.bit_length() - 1))
    with inside():
        a, b, c = _matrices(side, dtype, device)
        while True:
            torch.mm(a, b, out=c)
            wait()
            began_s = time.monotonic()
            torch.mm(a, b, out=c)
            wait()
            if time.monotonic() - began_s >= _FULL_S or 2 * side > min(largest, LARGEST_SIDE):
                break
            side *= 2
            a, b, c = _matrices(side, dtype, device)
    state.size = f"{side} × {side} {str(dtype).removeprefix('torch.')}"

    def multiply() -> int:
        with inside():
            for _ in range(_QUEUED):
                torch.mm(a, b, out=c)
            wait()
        return _QUEUED

    return multiply


def _matrices(side: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two factors and room for their product; random bits draw more power than equal ones."""
    generator = np.random.Generator(np.random.PCG64(_SEED))
    a, b = (torch.from_numpy(generator.standard_normal((side, side), dtype=np.float32)) for _ in range(2))
    return a.to(device, dtype), b.to(device, dtype), torch.empty((side, side), dtype=dtype, device=device)
