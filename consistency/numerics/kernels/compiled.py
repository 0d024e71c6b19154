"""Load the compiled kernel (`kernel.c`) and call it. `kernels.trust` decides whether it may be used."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from consistency.numerics.kernels.tally import Tally, is_worse, worse

PLAIN_VARIABLE = "CONSISTENCY_NO_KERNEL"
"""Set to any value, it disables the kernel; set while the package is built, it leaves the kernel out."""

LIBRARY = Path(__file__).with_name("_kernel.so")
SOURCE = Path(__file__).with_name("kernel.c")

BLOCK = 512
"""Elements per block of `kernel.c`."""

CHUNK = 64 * BLOCK
"""Elements that share a sum: few enough for a small rounding error, many enough that storing the sums costs nothing."""

_MIN_BYTES_PER_THREAD = 1 << 20
"""Least bytes that a thread measures: to hand work to it takes some 30 µs; to measure this much takes some 200 µs."""

_MIN_DIGESTED_PER_THREAD = 4 << 20
"""Least bytes that a thread digests: this much takes some 500 µs."""

KINDS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes that the kernel measures, in the order of `enum kind` in `kernel.c`."""

DIGEST = "digest"
"""The purpose of digesting rows."""


def errors_in(kind: str) -> str:
    """Return the purpose of measuring a dtype of `KINDS` against exact values."""
    return f"errors in {kind}"


PURPOSES = (*KINDS, *map(errors_in, KINDS), DIGEST)
"""Purposes that the kernel is used for: measuring two tensors of a dtype, or one and its exact values; and digests."""

VARIANTS = ("plain", "avx2", "avx512")
"""Names of the kernel's variants, by their numbers in `kernel.c`."""

_NONE = np.empty(0, np.int64)


class _Range(ctypes.Structure):
    """The measures of one range; `struct seen` of `kernel.c`, which documents the fields."""

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


class Errors(ctypes.Structure):
    """The errors of a tensor against its exact value; `struct errors` of `kernel.c`, which documents the fields."""

    _fields_ = (
        ("mismatched", ctypes.c_int64),
        ("worst", ctypes.c_int64),
        ("max_abs", ctypes.c_double),
        ("max_rel", ctypes.c_double),
        ("ratio", ctypes.c_double),
        ("magnitude", ctypes.c_double),
        ("worst_exact", ctypes.c_double),
        ("max_ulp", ctypes.c_uint64),
    )


class Computed(ctypes.Structure):
    """A tensor, its exact value and its allowance; `struct computed` of `kernel.c`, which documents the fields."""

    _fields_ = (
        ("actual", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("size", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        ("allowance", ctypes.c_int),
        ("product_or_rtol", ctypes.c_double),
        ("weight", ctypes.c_double),
        ("floor_or_atol", ctypes.c_double),
    )


ALLOWANCES = ("none", "given", "derived", "user")
"""Kinds of allowances, in the order of `enum allowance` in `kernel.c`."""


class Kernel:
    """The functions of a loaded library, in one of `VARIANTS`, by default the last that this processor can run.

    Raises
    ------
    OSError, AttributeError
        The library cannot be loaded, or is not the kernel.
    ValueError
        It was compiled from a source other than the one next to it, or the processor cannot run the variant.
    """

    def __init__(self, path: Path, *, variant: int | None = None) -> None:
        library = ctypes.CDLL(str(path))
        library.consistency_source.restype = ctypes.c_uint32
        if SOURCE.exists() and library.consistency_source() != zlib.crc32(SOURCE.read_bytes()):
            raise ValueError(f"{path.name} was compiled from another {SOURCE.name}: install the package again")
        self.variants: int = library.consistency_variants()
        # variants are numbered from the plainest one on, and the library counts those that this processor can run
        self.variant = self.variants - 1 if variant is None else variant
        if not 0 <= self.variant < self.variants:
            raise ValueError(f"this processor cannot run {VARIANTS[self.variant]}")
        pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self._measure = library.consistency_measure
        self._measure.argtypes = (number, number, number, pointer, pointer, count, count, pointer, pointer, pointer)
        self._measure.restype = None
        self._errors = library.consistency_errors
        self._errors.argtypes = (number, number, pointer, count, count, count, pointer, pointer, pointer, pointer)
        self._errors.restype = count
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
    ) -> Tally:
        """Measure two arrays of floats; the result does not depend on the number of threads.

        Parameters
        ----------
        kind : str
            One of `KINDS`.
        actual, expected : int
            Addresses of the first element.
        parts : int
            Elements per number: 2 for complex numbers.
        threads : int
            Upper limit.
        chunk : int
            Elements that share a sum, a multiple of `BLOCK`.
        """
        sums = np.zeros((2, -(-elements // chunk)))
        width = 2 if kind.endswith("16") else int(kind[-2:]) // 8
        thread_count = max(1, min(threads, elements * width // _MIN_BYTES_PER_THREAD))
        step = max(1, -(-sums.shape[1] // thread_count)) * chunk

        def measure_from(start: int) -> _Range:
            measured = _Range()
            offset, first_chunk = start * width, start // chunk
            self._measure(
                self.variant,
                KINDS.index(kind),
                parts,
                actual + offset,
                expected + offset,
                min(step, elements - start),
                chunk,
                sums[0, first_chunk:].ctypes.data,
                sums[1, first_chunk:].ctypes.data,
                ctypes.addressof(measured),
            )
            return measured

        starts = range(0, elements, step)
        futures = [pool(os.getpid(), threads - 1).submit(measure_from, start) for start in starts[1:]]
        # the first range is measured on this thread, while the others run
        ranges = [*map(measure_from, starts[:1]), *(future.result() for future in futures)]
        return _merged(zip(starts, ranges, strict=True), sums)

    def errors(
        self, kind: str, of: Computed, seen: Errors, *, start: int, elements: int, chunk: int, sums: np.ndarray
    ) -> np.ndarray:
        """Add elements of a tensor to its errors.

        Parameters
        ----------
        kind : str
            One of `KINDS`.
        of : Computed
            The elements, with exact values and tolerances.
        seen : Errors
            The errors of the tensor so far, which are updated.
        start : int
            Number of the first element in the tensor.
        chunk : int
            Elements that share a sum, a multiple of `BLOCK`.
        sums : np.ndarray
            `(2, chunks)` float64, which is overwritten: the sums of errors, and of their squares.

        Returns
        -------
        np.ndarray
            Numbers of the chunks that were left out, because something in them is not finite.
        """
        left_out = np.empty(sums.shape[1], np.uint8)
        any_left_out = self._errors(
            self.variant,
            KINDS.index(kind),
            ctypes.addressof(of),
            start,
            elements,
            chunk,
            sums[0].ctypes.data,
            sums[1].ctypes.data,
            left_out.ctypes.data,
            ctypes.addressof(seen),
        )
        return np.flatnonzero(left_out) if any_left_out else _NONE

    def digest(self, data: int, rows: int, w: np.ndarray, v: np.ndarray, out: np.ndarray, *, threads: int = 1) -> None:
        """Digest whole rows at an address, with the weights of a row, into contiguous int64; `threads` at most."""
        row_bytes, weights = w.nbytes, (w.ctypes.data, v.ctypes.data)
        thread_count = max(1, min(threads, rows * row_bytes // _MIN_DIGESTED_PER_THREAD))
        step = max(1, -(-rows // thread_count))

        def digest_from(start: int) -> None:
            address, count = data + start * row_bytes, min(step, rows - start)
            self._digest(self.variant, address, count, *weights, out.ctypes.data + start * out.itemsize)

        starts = range(0, rows, step)
        futures = [pool(os.getpid(), threads - 1).submit(digest_from, start) for start in starts[1:]]
        for start in starts[:1]:  # on this thread, while the others run
            digest_from(start)
        for future in futures:
            future.result()


def _merged(ranges: Iterable[tuple[int, _Range]], sums: np.ndarray) -> Tally:
    """Merge ranges, each given with its first element, in order."""
    tally = Tally(sums=sums[0].tolist(), squares=sums[1].tolist())
    flips = np.zeros(64, np.int64)
    for start, measured in ranges:
        if not measured.mismatched:
            continue
        tally.mismatched += measured.mismatched
        tally.max_abs = worse(tally.max_abs, measured.max_abs)
        tally.max_rel = worse(tally.max_rel, measured.max_rel)
        tally.max_ulp = max(tally.max_ulp or 0, measured.max_ulp)
        if tally.first is None:
            tally.first = start + measured.first
        tally.last = start + measured.last
        if tally.worst is None or is_worse(measured.max_abs, tally.worst[0]):
            tally.worst = (measured.max_abs, start + measured.worst)
        flips += np.ctypeslib.as_array(measured.flips)
    if math.isnan(tally.max_abs):  # NaN on one side alone has no place in the order
        tally.max_ulp = None
    tally.flipped = {bit: count for bit, count in enumerate(flips.tolist()) if count}
    return tally


@functools.cache
def pool(process: int, threads: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a forked process has none of the threads
    """Return the threads on which a process measures and digests."""
    return ThreadPoolExecutor(threads, thread_name_prefix="consistency-kernel")


@functools.cache
def load() -> Kernel | str:
    """Return the kernel of this installation, or the reason why there is none."""
    if os.environ.get(PLAIN_VARIABLE):
        return f"{PLAIN_VARIABLE} is set"
    if not LIBRARY.exists():
        return "this installation was built without it"
    try:
        return Kernel(LIBRARY)
    except (OSError, AttributeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
