"""Write signs of life where an operation is long and writes no event.

A float64 pass through a large model can be silent for longer than the stall limit, and so can loading it from a slow
disk. On the CPU, processor time tells both from a deadlock or a stopped process, which use none. On an accelerator it
does not: a thread that waits for a device spins, even if the device never answers. But it touches no memory. So bytes
that are read and pages that are touched for the first time count on both: those of a load, whose weights may come from
a disk at the cost of no processor time at all, and of a base that is streamed through a device.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType

from consistency.worker.protocol import EventLog

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

EVERY_S = 10.0
"""Seconds between two signs: short compared with any useful stall limit."""

BUSY = 0.05
"""Processor seconds per second from which a process computes. Threads that poll or sleep take a hundredth of that."""

MOVED = 256 << 10
"""Bytes between two signs from which a process reads or touches memory: a hundredth of what a slow disk (3 MB/s)
brings in that time. A process that waits, this thread included, touches a page now and then."""

_PAGE = 4096  # the smallest there is: of larger ones fewer are counted, and each is more


class Heartbeat:
    """Write a sign of life every few seconds, while the process really does something."""

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
        before = _Pulse()
        while not self._stop.wait(self._every_s):
            now = _Pulse()
            if now.is_alive_since(before, is_on_cpu=self._events.is_on_cpu):
                try:
                    self._events.alive()
                except OSError:
                    return  # the disk is full: the worker finds out by itself
            before = now


class _Pulse:
    """The work that the process has done so far."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.processor_s = time.process_time()
        self.moved_bytes = _moved_bytes()

    def is_alive_since(self, before: _Pulse, *, is_on_cpu: bool) -> bool:
        """Report whether the process has worked since an earlier pulse.

        Bytes that it read or touched count anywhere, its processor time only while it computes on the CPU.
        """
        elapsed_s = self.at - before.at
        is_busy = self.processor_s - before.processor_s > BUSY * elapsed_s
        has_moved = self.moved_bytes - before.moved_bytes > MOVED
        return has_moved or (is_busy and is_on_cpu)


def _moved_bytes() -> int:
    """Return the bytes that the process has read, and those of the pages that it has touched for the first time."""
    moved = 0
    if resource is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        moved += (usage.ru_minflt + usage.ru_majflt) * _PAGE
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:  # no Linux, or not allowed
        return moved
    return moved + sum(int(line.partition(":")[2]) for line in lines if line.startswith(("rchar", "read_bytes")))
