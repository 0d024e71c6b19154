"""Recognize errors that mean memory ran out. No torch here: `__main__` uses this before importing it."""

from __future__ import annotations


def is_out_of_memory(error: BaseException) -> bool:
    """Report whether an error means that memory ran out, on the host or on a device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # torch's allocator of host memory raises a plain RuntimeError (c10/core/impl/alloc_cpu.cpp)
    text = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in text or "can't allocate memory" in text)
