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
"""Entries that are read at once: 1 MiB, which cover 512 MiB."""


def release(tensors: Iterable[torch.Tensor]) -> None:
    """Drop the pages of tensors that are still pages of a file.

    Nothing is dropped where the system does not report which pages these are.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            for first, stop in _page_ranges(tensors):
                for begin, end in _file_pages(pagemap.fileno(), first, stop):
                    # where the system refuses, they stay, and nothing is lost
                    madvise(begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE, mmap.MADV_DONTNEED)
    except OSError:  # no such file, or no permission
        return


def _page_ranges(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of whole pages that tensors on the CPU cover: the first page, and the one after the last.

    Tensors that follow each other in memory are one range, so that a page that two of them share is dropped too.
    """
    addresses = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for tensor in tensors
        if tensor.device.type == "cpu" and tensor.is_contiguous()
    )
    start = stop = 0
    for begin, end in [*addresses, (sys.maxsize, sys.maxsize)]:  # the last one ends the range before it
        if begin <= stop:
            stop = max(stop, end)
            continue
        first, last = -(-start // mmap.PAGESIZE), stop // mmap.PAGESIZE  # whole pages
        if first < last:
            yield first, last
        start, stop = begin, end


def _file_pages(pagemap: int, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of resident pages, from `first` up to `stop`, that are still pages of a file."""
    for begin in range(first, stop, _ENTRIES_AT_ONCE):
        count = min(stop - begin, _ENTRIES_AT_ONCE)
        entries = np.frombuffer(os.pread(pagemap, count * 8, begin * 8), np.uint64)
        both = _FILE | _PRESENT
        inside = np.concatenate(([False], (entries & both) == both, [False]))
        # the pages where a range begins and the ones after its end, in turn
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
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # musl and macOS have none, Windows no library of that name
        return None
    malloc_trim.argtypes = (ctypes.c_size_t,)
    return malloc_trim
