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
from consistency.extras.operations.soak.step import CPU_BATCH, CPU_SIDE, FREE_PARTS, LARGEST_SIDE
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
    """The state of a load, which its thread writes: size and number of its products, and its errors.

    Attributes
    ----------
    size : str
        Size and dtype of a product, for people.
    error : str or None
        The sentence why the load ended early; None while it goes on.
    device_error : Exception or None
        The error of the device that ended the load; None for any other error, or none.
    products : int
        Number of products that are done.
    """

    def __init__(self) -> None:
        self.size = ""
        self.error: str | None = None
        self.device_error: Exception | None = None
        self.products = 0
        self.began_s = time.monotonic()

    def summary(self) -> Load:
        """Return the facts of the load for a capture."""
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
    if state.device_error is not None:
        raise state.device_error


def _work(device: torch.device, state: Busy, begun: threading.Event, stop: threading.Event) -> None:
    """Multiply until `stop` is set; set `begun` after the first product, or when the load has failed."""
    try:
        is_cpu = device.type == "cpu"
        multiply = _multiply_on_cpu(state) if is_cpu else _multiply_on_accelerator(device, state)
        state.began_s = time.monotonic()
        while not stop.is_set():
            state.products += multiply()
            begun.set()
    except (RuntimeError, MemoryError) as error:
        state.error = f"the load ended: {first_line(error)}"
        if not is_out_of_memory(error) and is_of_the_device(error, device):
            state.device_error = error
    finally:
        # a load that failed at once must not keep `busy` waiting
        begun.set()


def _multiply_on_cpu(state: Busy) -> Callable[[], int]:
    """Return a function that computes some products with NumPy, and returns how many."""
    generator = np.random.Generator(np.random.PCG64(_SEED))
    shape = (CPU_BATCH, CPU_SIDE, CPU_SIDE)
    a, b = (generator.standard_normal(shape, dtype=np.float32) for _ in range(2))
    c = np.empty(shape, np.float32)
    state.size = f"{CPU_SIDE} × {CPU_SIDE} float32, one thread"

    def multiply() -> int:
        np.matmul(a, b, out=c)
        return CPU_BATCH

    return multiply


def _multiply_on_accelerator(device: torch.device, state: Busy) -> Callable[[], int]:
    """Return a function that computes some products on a stream of its own, waits for them, and returns how many."""
    module: Any = torch.get_device_module(device.type)
    has_streams = hasattr(module, "Stream") and hasattr(module, "stream")
    stream = module.Stream(device=device) if has_streams else None

    def on_stream() -> Any:
        return nullcontext() if stream is None else module.stream(stream)

    def wait() -> None:
        if stream is not None and hasattr(stream, "synchronize"):
            stream.synchronize()
        else:
            module.synchronize()

    dtype = torch.float32
    if device.type == "cuda":
        dtype = torch.bfloat16  # computed by tensor cores, which draw the most power
    with on_stream():
        a, b, product = _large_matrices(device, dtype, wait)
    side = product.shape[0]
    state.size = f"{side} × {side} {str(dtype).removeprefix('torch.')}"

    def multiply() -> int:
        with on_stream():
            for _ in range(_QUEUED):
                torch.mm(a, b, out=product)
            wait()
        return _QUEUED

    return multiply


def _large_matrices(
    device: torch.device, dtype: torch.dtype, wait: Callable[[], None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two factors and room for their product, so large that a product takes `_FULL_S`, or as memory allows."""
    free = free_bytes(device)
    largest = LARGEST_SIDE
    if free is not None:
        largest = math.isqrt(free // (FREE_PARTS * 3 * dtype.itemsize))
    # a power of two, and not larger than what fits
    side = min(_SMALLEST_SIDE, 1 << max(0, largest.bit_length() - 1))
    while True:
        a, b, product = _matrices(side, dtype, device)
        # the first product of a size also chooses and loads its kernel, so the second one is timed
        torch.mm(a, b, out=product)
        wait()
        began_s = time.monotonic()
        torch.mm(a, b, out=product)
        wait()
        is_long_enough = time.monotonic() - began_s >= _FULL_S
        if is_long_enough or 2 * side > min(largest, LARGEST_SIDE):
            return a, b, product
        side *= 2


def _matrices(side: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two factors and room for their product; random bits draw more power than equal ones."""
    generator = np.random.Generator(np.random.PCG64(_SEED))
    a, b = (torch.from_numpy(generator.standard_normal((side, side), dtype=np.float32)) for _ in range(2))
    return a.to(device, dtype), b.to(device, dtype), torch.empty((side, side), dtype=dtype, device=device)
