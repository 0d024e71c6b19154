"""Give pages back to the system: of mapped weights that nothing reads, and what the C library keeps for reuse.

Weights on the CPU are mapped from their file. Every page that was read stays resident as long as the mapping, also of
what is never read again: the base's own embedding beneath a trained copy, or the adapter's file once it was compared.
Such a page is only dropped from this process, and read again from the system's cache where it is used again.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

_FILE, _PRESENT = np.uint64(1 << 61), np.uint64(1 << 63)
"""Bits of an entry of /proc/self/pagemap (proc(5)): a page of a file, and resident.

In a private mapping, a page that was written to is no page of the file any more.
"""

_ENTRIES_AT_ONCE = 1 << 17
"""1 MiB of entries, which cover 512 MiB."""


def release(tensors: Iterable[torch.Tensor]) -> None:
    """Drop the pages of tensors that hold what is in a file.

    Nothing is dropped where the system does not report which pages these are.
    """
    if sys.platform != "linux":
        return
    drop = ctypes.CDLL(None).madvise
    drop.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            for first, stop in _runs(tensors):
                for begin, end in _of_files(pagemap.fileno(), first, stop):
                    # where the system refuses, they stay, and nothing is lost
                    drop(begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE, mmap.MADV_DONTNEED)
    except OSError:  # no such file, or no permission
        return


def _runs(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the first page and the one after the last of what tensors on the CPU cover without a gap."""
    parts = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for tensor in tensors
        if tensor.device.type == "cpu" and tensor.is_contiguous()
    )
    start = stop = 0
    for begin, end in [*parts, (sys.maxsize, sys.maxsize)]:
        if begin <= stop:
            stop = max(stop, end)
            continue
        first, last = -(-start // mmap.PAGESIZE), stop // mmap.PAGESIZE  # whole pages
        if first < last:
            yield first, last
        start, stop = begin, end


def _of_files(pagemap: int, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of resident pages that hold what is in a file."""
    for begin in range(first, stop, _ENTRIES_AT_ONCE):
        count = min(stop - begin, _ENTRIES_AT_ONCE)
        entries = np.frombuffer(os.pread(pagemap, count * 8, begin * 8), np.uint64)
        both = _FILE | _PRESENT
        inside = np.concatenate(([False], (entries & both) == both, [False]))
        edges = np.flatnonzero(inside[1:] != inside[:-1]) + begin
        yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def trim() -> None:
    """Return every free page of the C library's heap to the system; without glibc there is nothing to do.

    A worker on the CPU lets glibc keep what it frees (`launch.environment`): buffers of one size are used again and
    again within a stage. The next stage has buffers of other sizes, and would add to them.
    """
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
