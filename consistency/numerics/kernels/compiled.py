"""Whether the compiled kernel (`kernel.c`) may be used in this process, and its use where it may. No torch here.

An installation has it where there was a C compiler (`kernel_build`). Else NumPy computes the same, bit
for bit, but for mean and root mean square, which are sums of floats (`kernel_check.SUMS_APART`). A wrong measure or
digest is a false alarm or a miss. So before a process uses the kernel for a purpose, it holds it against NumPy on a
small input that has all that is hard (`kernel_check`); where they differ, or where it cannot be loaded, the process
keeps to NumPy, and `state` says why.
"""

from __future__ import annotations

import ctypes
import functools
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

PLAIN_VARIABLE = "CONSISTENCY_NO_KERNEL"
"""Set to anything, it keeps the kernel off; where a package is built, it is then left out of it."""

LIBRARY = Path(__file__).with_name("_kernel.so")
SOURCE = Path(__file__).with_name("kernel.c")

BLOCK = 512
"""Elements of a block of `kernel.c`."""

CHUNK = 64 * BLOCK
"""Elements that share a sum: few enough that it is off by little, so many that a sum for each is nothing to keep."""

_WORTH_BYTES = 1 << 20
"""Bytes per thread at least: handing over to a thread takes some 30 µs, and this some 200 µs to measure."""

KINDS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes it measures, in the order of their numbers in `kernel.c`."""

DIGEST = "digest"
VARIANTS = ("plain", "avx2", "avx512")


class Seen(ctypes.Structure):
    """What the kernel has seen of two ranges; `struct seen` of `kernel.c`, which says what each field is."""

    _fields_ = (
        ("mismatched", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("worst", ctypes.c_int64),
        ("max_abs", ctypes.c_double),
        ("max_rel", ctypes.c_double),
        ("max_ulp", ctypes.c_uint64),
        ("flips", ctypes.c_int64 * 64),
    )
    mismatched: int
    first: int
    last: int
    worst: int
    max_abs: float
    max_rel: float
    max_ulp: int
    flips: ctypes.Array[ctypes.c_int64]


class Kernel:
    """The functions of a loaded library, in one variant for the processor.

    Parameters
    ----------
    path : Path
    variant : int, optional
        Index into `VARIANTS`; by default the last that this processor can run.

    Raises
    ------
    OSError, AttributeError
        It cannot be loaded, or is another library.
    ValueError
        It was compiled of another source than the one beside it, or the processor cannot run the variant.
    """

    def __init__(self, path: Path, *, variant: int | None = None) -> None:
        library = ctypes.CDLL(str(path))
        library.consistency_source.restype = ctypes.c_uint32
        if SOURCE.exists() and library.consistency_source() != zlib.crc32(SOURCE.read_bytes()):
            raise ValueError(f"{path.name} was compiled of another {SOURCE.name}: install the package again")
        self.variants: int = library.consistency_variants()
        self.variant = self.variants - 1 if variant is None else variant
        if not 0 <= self.variant < self.variants:
            raise ValueError(f"this processor cannot run {VARIANTS[self.variant]}")
        pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self._measure = library.consistency_measure
        self._measure.argtypes = (number, number, number, pointer, pointer, count, count, pointer, pointer, pointer)
        self._measure.restype = None
        self._digest = library.consistency_digest
        self._digest.argtypes = (number, pointer, count, pointer, pointer, pointer)
        self._digest.restype = None

    def measure(
        self,
        kind: str,
        actual: int,
        expected: int,
        elements: int,
        *,
        parts: int = 1,
        threads: int = 1,
        chunk: int = CHUNK,
    ) -> tuple[list[tuple[int, Seen]], np.ndarray]:
        """Measure two ranges of floats; the answer does not depend on the threads.

        Parameters
        ----------
        kind : str
            One of `KINDS`.
        actual, expected : int
            Addresses of the first element.
        elements : int
        parts : int
            Of how many elements one makes a number: 2 for a complex one.
        threads : int
            At most so many are used.
        chunk : int
            Elements that share a sum, a multiple of `BLOCK`.

        Returns
        -------
        list of (int, Seen)
            Parts of the range in order, each with its first element: places in it count from there.
        np.ndarray
            Sums of the differences and of their squares, `(2, chunks)` float64.
        """
        sums = np.zeros((2, -(-elements // chunk)))
        width = 2 if kind.endswith("16") else int(kind[-2:]) // 8
        most = max(1, min(threads, elements * width // _WORTH_BYTES))
        step = max(1, -(-sums.shape[1] // most)) * chunk

        def look(start: int) -> tuple[int, Seen]:
            seen = Seen()
            offset, place = start * width, start // chunk
            self._measure(
                self.variant, KINDS.index(kind), parts, actual + offset, expected + offset,
                min(step, elements - start), chunk, sums[0, place:].ctypes.data, sums[1, place:].ctypes.data,
                ctypes.addressof(seen),
            )  # fmt: skip
            return start, seen

        starts = range(0, elements, step)
        if len(starts) < 2:
            return [look(start) for start in starts], sums
        others = [_pool(os.getpid(), threads - 1).submit(look, start) for start in starts[1:]]
        return [look(0), *(other.result() for other in others)], sums

    def digest(self, data: int, rows: int, w: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
        """Digest whole rows at an address, with the weights of a row, into contiguous int64."""
        self._digest(self.variant, data, rows, w.ctypes.data, v.ctypes.data, out.ctypes.data)


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a forked process has none of the threads
    return ThreadPoolExecutor(threads, thread_name_prefix="consistency-kernel")


@functools.cache
def _loaded() -> Kernel | str:
    if os.environ.get(PLAIN_VARIABLE):
        return f"{PLAIN_VARIABLE} is set"
    if not LIBRARY.exists():
        return "this installation was built without it"
    try:
        return Kernel(LIBRARY)
    except (OSError, AttributeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@functools.cache
def _refused(purpose: str) -> str | None:
    found = _loaded()
    if isinstance(found, str):
        return found
    from consistency.numerics.kernels import check as kernel_check  # it needs what uses this module

    check: Callable[[Kernel, str], str | None] = kernel_check.check
    return check(found, purpose)


def trusted(purpose: str) -> Kernel | None:
    """Return the kernel if it may be used to measure a dtype of `KINDS` or to `DIGEST`; else None: use NumPy."""
    found = _loaded()
    return found if isinstance(found, Kernel) and _refused(purpose) is None else None


def state() -> str:
    """Say which path this process takes: `compiled: ` and the variant, or `numpy: ` and the reason."""
    found = _loaded()
    if isinstance(found, str):
        return f"numpy: {found}"
    refused = [f"{purpose}: {reason}" for purpose in (*KINDS, DIGEST) if (reason := _refused(purpose)) is not None]
    return f"numpy: {'; '.join(refused)}" if refused else f"compiled: {VARIANTS[found.variant]}"


def forget() -> None:
    """Forget what was found, so that it is tried again: for tests, which switch the kernel off and spoil it."""
    _loaded.cache_clear()
    _refused.cache_clear()
