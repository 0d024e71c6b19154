"""How many processors there are to share out among workers."""

from __future__ import annotations

import functools
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""File with two numbers: microseconds of processor time, or `max`, and the period for them (Linux, cgroup v2)."""


def available_cores() -> int:
    """Return how many processors this process may use, a container's quota included."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def threads_per_worker(workers: int) -> int:
    """Return how many threads each worker gets, at least 1.

    OpenMP threads of two workers on one core spin against each other.
    """
    return max(1, available_cores() // max(1, workers))


@functools.cache
def is_host_busy() -> bool:
    """Report whether processes computed on more than half of the host's cores when this was asked first.

    It is asked once: workers whose environments are alike are forked from one process.
    """
    if not hasattr(os, "getloadavg"):
        return False
    try:
        load = os.getloadavg()[0]
    except OSError:  # a sandbox may hide it
        return False
    return load > (os.cpu_count() or 1) / 2
