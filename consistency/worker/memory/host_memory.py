"""Read how much memory the host has given to this process, and how much is left. No torch at import."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any


def peak_bytes() -> int:
    """Return the largest resident size of this process since it was started, or since `reset_peak`.

    `ru_maxrss` starts at the parent's value (Linux carries it through fork and exec), and a parent may hold a model
    itself; the high-water mark of the memory map starts anew.
    """
    peak = _field("/proc/self/status", "VmHWM:")
    if peak is not None:
        return peak
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(usage) if sys.platform == "darwin" else int(usage) * 1024


def resident_bytes() -> int:
    """Return this process's resident size; where the system does not report it, the peak."""
    resident = _field("/proc/self/status", "VmRSS:")
    return peak_bytes() if resident is None else resident


def private_bytes() -> int | None:
    """Return the part of the resident size that maps no file; None where the system does not report it."""
    return _field("/proc/self/status", "RssAnon:")


def reset_peak() -> bool:
    """Restart `peak_bytes` from the current resident size; report whether the system can do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets the high-water mark
    except OSError:
        return False
    return True


def available_bytes() -> int | None:
    """Return the bytes that are available without swapping; None where the host does not report them."""
    return _field("/proc/meminfo", "MemAvailable:")


def free_bytes(device: Any) -> int | None:
    """Return the bytes that are free on a `torch.device` or on the host; None where that is unknown.

    A device that shares the host's memory counts the pages of files as used, which the kernel gives back when asked.
    """
    if device.type == "cpu":
        return available_bytes()
    import torch

    module = torch.get_device_module(device.type)
    if not hasattr(module, "mem_get_info"):
        return None
    free = int(module.mem_get_info(device)[0])
    if not hasattr(module, "get_device_properties"):
        return free
    shares_memory = bool(getattr(module.get_device_properties(device), "is_integrated", False))
    return max(free, available_bytes() or 0) if shares_memory else free


def _field(path: str, field: str) -> int | None:
    """Return a field of a /proc file in bytes, which counts in units of 1024; None on other systems."""
    try:
        lines = Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)
