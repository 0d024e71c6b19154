"""Give memory back to the system that the C library keeps for reuse. No torch at import.

A worker on the CPU lets glibc keep what it frees (`launch.environment`): buffers of one size are used again and again
within a stage. The next stage has buffers of other sizes, and would add to them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def trim() -> None:
    """Return every free page of the C library's heap to the system; without glibc there is nothing to do."""
    give_back = _malloc_trim()
    if give_back is not None:
        give_back(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # musl and macOS have none, Windows no library of that name
        return None
    found.argtypes = (ctypes.c_size_t,)
    return found
