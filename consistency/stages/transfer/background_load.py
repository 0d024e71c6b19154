"""Load the devices during copies: some copies fail only while kernels run.

A lazy backend, one that has `settle`, takes all that a process does with its devices from one thread: torch_xla loses
tensors that one thread makes while another has its graph run. There the work is queued before the copies, and these
are made in turn while it runs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from consistency.devices.backends import backend_of

_SIDE = 512
"""Side of the matrices that are multiplied."""

_QUEUED = 8
"""Products queued at a time: on a GPU some tenths of a millisecond, as long as the copies take; on one core of a CPU
some tens."""


def wait(devices: Iterable[torch.device]) -> None:
    """Wait until these devices are idle."""
    for device in devices:
        if device.type != "cpu":
            module = torch.get_device_module(device.type)
            if backend_of(device.type).synchronizes_one:
                module.synchronize(device)
            else:
                module.synchronize()


@contextmanager
def under_load(devices: Sequence[torch.device]) -> Iterator[None]:
    """Keep devices busy with matrix products, which have begun on entry."""
    stop = threading.Event()
    threads = []
    for device in dict.fromkeys(devices):
        settle = _settle_of(device)
        if settle is not None:  # a lazy backend: the work is queued from this thread, before the copies
            factor = _factor(device)
            functools.reduce(torch.matmul, [factor] * (_QUEUED + 1))
            settle(device)
            continue
        begun = threading.Event()
        thread = threading.Thread(target=_work, args=(device, begun, stop), daemon=True)
        thread.start()
        threads.append(thread)
        begun.wait()  # the copies are to find the device at work
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _work(device: torch.device, begun: threading.Event, stop: threading.Event) -> None:
    """Multiply matrices on a device until told to stop; `begun` is set when the first products are made."""
    queued = _QUEUED if device.type != "cpu" else 1
    try:
        product = factor = _factor(device)
        while not stop.is_set():
            for _ in range(queued):
                product = product @ factor
            begun.set()
            wait([device])
    finally:
        begun.set()  # a device that cannot multiply is not loaded, and its copies are checked all the same


def _factor(device: torch.device) -> torch.Tensor:
    return torch.full((_SIDE, _SIDE), 1 / _SIDE, device=device)  # its powers keep its magnitude


def _settle_of(device: torch.device) -> Callable[[torch.device], None] | None:
    """Return the function that makes a lazy backend run the operations it has noted; None for another backend."""
    if device.type == "cpu":
        return None
    return getattr(torch.get_device_module(device.type), "settle", None)


def all_at_once(calls: Sequence[Callable[[], None]], devices: Sequence[torch.device]) -> None:
    """Make all calls at once, each in its own thread and, where the backend has them, on its own streams.

    On a lazy backend they are made one after the other.
    """
    if any(_settle_of(device) is not None for device in devices):
        for call in calls:
            call()
        return

    def on_own_streams(call: Callable[[], None]) -> None:
        with ExitStack() as stack:
            for device in dict.fromkeys(devices):
                if device.type == "cpu":
                    continue
                module: Any = torch.get_device_module(device.type)
                if hasattr(module, "Stream") and hasattr(module, "stream"):
                    stack.enter_context(module.stream(module.Stream(device=device)))
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(on_own_streams, calls))
