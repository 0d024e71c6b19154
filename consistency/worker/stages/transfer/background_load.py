"""Work for the devices while copies are on their way: some copies fail only beside running kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from consistency.devices.backends import backend_of

_SIDE = 512
_QUEUED = 8
"""Products of matrices of this side, and how many are queued at a time: on a GPU some tenths of a millisecond, as long
as the copies take; on one core of a CPU some tens."""


def wait(devices: Iterable[torch.device]) -> None:
    """Wait until everything that was asked of these devices is done."""
    for device in devices:
        if device.type != "cpu":
            module = torch.get_device_module(device.type)
            module.synchronize(*([device] if backend_of(device.type).synchronizes_one else []))


@contextmanager
def under_load(devices: Sequence[torch.device]) -> Iterator[None]:
    """Keep devices busy with matrix products, which have begun when this is entered."""
    stop = threading.Event()
    threads = []
    for device in dict.fromkeys(devices):
        begun = threading.Event()
        thread = threading.Thread(target=_work, args=(device, begun, stop), daemon=True)
        thread.start()
        threads.append(thread)
        begun.wait()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _work(device: torch.device, begun: threading.Event, stop: threading.Event) -> None:
    try:
        factor = torch.full((_SIDE, _SIDE), 1 / _SIDE, device=device)  # its products keep its size
        product = factor
        while not stop.is_set():
            for _ in range(_QUEUED if device.type != "cpu" else 1):
                product = product @ factor
            begun.set()
            wait([device])
    finally:
        begun.set()  # where the device cannot multiply there is no work, and the copies are looked at all the same


def all_at_once(calls: Sequence[Callable[[], None]], devices: Sequence[torch.device]) -> None:
    """Call everything at once, each in a thread of its own and, where the backend has them, on streams of its own."""

    def on_own_streams(call: Callable[[], None]) -> None:
        with ExitStack() as stack:
            for device in dict.fromkeys(devices):
                module: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
                if hasattr(module, "Stream") and hasattr(module, "stream"):
                    stack.enter_context(module.stream(module.Stream(device=device)))
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(on_own_streams, calls))
