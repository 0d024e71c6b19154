"""Memory: how much was taken, and the want of it, in the several ways in which it is told.

No torch here: `__main__` uses this before importing it.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any


def peak_bytes() -> int:
    """Return the largest resident size that this process has had since it was started, or since `reset_peak`.

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


def resident_bytes() -> int:
    """Return what this process has resident now; where the system does not tell, what it had at most."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return peak_bytes()


def reset_peak() -> bool:
    """Let `peak_bytes` start again from what is resident now; tell whether the system can do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets the high-water mark
    except OSError:
        return False
    return True


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


def free_bytes(device: Any) -> int | None:
    """Return how much memory is free on a device, a `torch.device`, or on the host; None where nobody tells."""
    if device.type == "cpu":
        return _free_on_host()
    import torch

    module = torch.get_device_module(device.type)
    return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else None


def _free_on_host() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
