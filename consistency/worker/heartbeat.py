"""Signs of life while the worker computes on the CPU: one long operation writes no events.

A float64 pass through a large model can be silent for longer than the stall limit. Processor time tells it from a
deadlock or a stopped process, which use none. On an accelerator it would tell nothing: a thread that waits for a device
spins, even if the device never answers, so there the worker's own events are the only signs.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from consistency.worker.protocol import EventLog

EVERY_S = 10.0
"""Seconds between two signs: short compared with any useful stall limit."""

BUSY = 0.05
"""Processor seconds per second from which a process computes. Threads that poll or sleep take a hundredth of that."""


class Heartbeat:
    """Write a sign of life every few seconds, while the log says that the CPU computes and it really does."""

    def __init__(self, events: EventLog, *, every_s: float = EVERY_S) -> None:
        self._events = events
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="consistency-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        used, at = time.process_time(), time.monotonic()
        while not self._stop.wait(self._every_s):
            used_before, at_before = used, at
            used, at = time.process_time(), time.monotonic()
            if self._events.is_on_cpu and used - used_before > BUSY * (at - at_before):
                try:
                    self._events.alive()
                except OSError:
                    return  # the disk is full: the worker finds out by itself
