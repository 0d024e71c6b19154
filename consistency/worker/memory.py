"""Memory: how much was taken, and the want of it, in the several ways in which it is told.

No torch here: `__main__` uses this before importing it.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_bytes() -> int:
    """Return the largest resident size that this process has had since it was started.

    `ru_maxrss` starts with what the parent had when it started us (Linux carries it through fork and exec), and a
    parent may hold a model of its own; the high-water mark of the memory map starts anew.
    """
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def available_bytes() -> int | None:
    """Return how much memory the host can still give without swapping; None where it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on the host or on a device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # torch's allocator of host memory raises a plain RuntimeError (c10/core/impl/alloc_cpu.cpp)
    text = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in text or "can't allocate memory" in text)
