"""Check the compiled kernel against NumPy on a small input that covers the hard cases."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import torch

from consistency.numerics.bound import Allowance, UserAllowance
from consistency.numerics.chunks import LowRankProduct, LowRankTensor, Stretch
from consistency.numerics.dtype import bit_patterns, name_of, named
from consistency.numerics.kernels import numpy_digest
from consistency.numerics.kernels.compiled import BLOCK, CHUNK, DIGEST, KINDS, PRODUCTS, Kernel, errors_in
from consistency.numerics.kernels.compiled_error import CompiledErrors
from consistency.numerics.kernels.compiled_product import CompiledProduct
from consistency.numerics.kernels.numpy_distance import measure_by_numpy
from consistency.numerics.kernels.numpy_error import errors_by_numpy
from consistency.numerics.kernels.tally import ErrorTally, Tally, total

SUMS_APART = 2 * (CHUNK + 2) * 2.0**-53
"""Allowed relative difference between the sums of both paths. A sum of n terms of one sign is off by at most (n - 1) u,
to first order, in any order (Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., section 4.2), with
n <= CHUNK and u = 2**-53; a square and the sum over the chunks add one rounding each, and both paths are off. Twice the
mean is off by no more; the root halves it."""

_ELEMENTS = 3 * BLOCK + 78  # whole blocks and a partial one; even, for complex numbers

_CHUNK = 2 * BLOCK

_SHAPES = (("wide rows", 5, 3, _CHUNK + 77), ("rows", 21, 16, 215), ("short rows", 700, 1, 3))
"""Rows, rank and columns of products."""

_OVERFLOWING_BYTES = 257 << 10
"""The kernel counts set bits of 16 vectors of 64 bytes at a time, and keeps at most 255 such counts in a byte."""


def check(kernel: Kernel, purpose: str) -> str | None:
    """Return what the kernel gets wrong for a purpose; None if it may be trusted."""
    if purpose == DIGEST:
        return _check_digest(kernel)
    if purpose == PRODUCTS:
        return _check_products(kernel)
    return _check_measures(kernel, purpose) if purpose in KINDS else _check_errors(kernel, purpose)


def _check_digest(kernel: Kernel) -> str | None:
    words = numpy_digest.ROW_WORDS
    rows = made_up(np.dtype(np.int64), 7 * words)
    rows[words : 3 * words] = -1  # the largest sums of halves
    # at an odd address, where a tensor of a mapped file may start
    shifted = np.empty(rows.nbytes + 1, np.uint8)[1:]
    shifted[:] = rows.view(np.uint8)
    expected, actual = np.empty((2, 7), np.int64)
    numpy_digest.sum_rows(rows.view(np.uint8), expected)
    for raw in (rows.view(np.uint8), shifted):
        kernel.digest(raw.ctypes.data, 7, *numpy_digest.weights_of_row(), actual)
        if not np.array_equal(actual, expected):
            return f"wrong digests in {int((actual != expected).sum())} of 7 test rows"
    return None


def _check_measures(kernel: Kernel, kind: str) -> str | None:
    dtype = named(kind)
    for name, a, e in hard_pairs(dtype):
        for parts in (1, 2):
            actual = measure_by(kernel, a, e, parts=parts, chunk=2 * BLOCK)  # two chunks
            wrong = differs_in(actual, measure_by_numpy(a, e, parts))
            if wrong is not None:
                return f"wrong {wrong} on {name}"
    return None if _counts_all_bits(kernel, dtype) else "wrong count of flipped bits"


def _check_errors(kernel: Kernel, purpose: str) -> str | None:
    dtype = named(next(kind for kind in KINDS if errors_in(kind) == purpose))
    for name, stretch in hard_stretches(dtype):
        wrong = errors_differ_in(*errors_by_both(kernel, stretch))
        if wrong is not None:
            return f"wrong {wrong} on {name}"
    return None


def _check_products(kernel: Kernel) -> str | None:
    """Check products, and the measure of errors against them, which is that against any exact values."""
    for kind in KINDS:
        wrong = _check_errors(kernel, errors_in(kind))
        if wrong is not None:
            return f"{wrong} in {kind}"
    for name, product, tensors in hard_products():
        for found, expected in zip(*products_by_both(kernel, product, tensors), strict=True):
            wrong = errors_differ_in(found, expected)
            if wrong is not None:
                return f"wrong {wrong} on {name}"
    return None


def products_by_both(
    kernel: Kernel, product: LowRankProduct, tensors: list[LowRankTensor]
) -> tuple[list[ErrorTally], list[ErrorTally]]:
    """Measure tensors with a given kernel, in two parts, and with NumPy, by chunks of two blocks."""
    compiled = CompiledProduct(kernel, tensors, product, chunk=_CHUNK)
    middle = product.rows // 2 // compiled.rows_per_tile * compiled.rows_per_tile
    found = compiled.measure(range(middle))
    for tally, more in zip(found, compiled.measure(range(middle, product.rows)), strict=True):
        tally.include(more)
    expected = [ErrorTally() for _ in tensors]
    for drawn in product.stretches(tensors, range(product.rows)):
        for tally, stretch in zip(expected, drawn, strict=True):
            for start in range(0, len(stretch.value), _CHUNK):
                tally.include(errors_by_numpy(stretch.chunk(start, _CHUNK)))
    return found, expected


def hard_products() -> list[tuple[str, LowRankProduct, list[LowRankTensor]]]:
    """Return deltas and merged weights of all dtypes that are off by some roundings; one has an infinity.

    Factors are small integers times a power of two, so no order of adding up rounds, and every path has the same bits.
    There are rows of more columns than a tile has elements, of some that fit into one, and of fewer than a vector has.
    """
    stream = np.random.Generator(np.random.PCG64(3))
    found = []
    for kind, (name, rows, rank, columns) in itertools.product(KINDS, _SHAPES):
        dtype, eps = named(kind), torch.finfo(named(kind)).eps
        left, right = (
            torch.from_numpy(stream.integers(-64, 65, shape) * 2.0**-7) for shape in ((rows, rank), (rank, columns))
        )
        base = torch.from_numpy(stream.standard_normal((rows, columns))).to(dtype)
        exact = left @ right * 0.5
        off = 1 + torch.from_numpy(stream.integers(-2, 3, exact.shape)) * eps
        delta, merged = (exact * off).to(torch.float32), ((exact + base.to(torch.float64)) * off).to(dtype)
        spoilt = merged.clone()
        spoilt[rows // 2, -1] = math.inf
        derived = Allowance(product=3 * eps, weight=2 * eps, floor=float(eps))
        user = UserAllowance(atol=eps, rtol=2 * eps)
        tensors = [
            LowRankTensor(actual=delta, allowance=replace(derived, weight=0.0), has_base=False),
            *(LowRankTensor(actual=merged, allowance=allowance, has_base=True) for allowance in (derived, user)),
            LowRankTensor(actual=spoilt, allowance=derived, has_base=True),
        ]
        product = LowRankProduct(left=left, right=right, scaling=0.5, base=base)
        found.append((f"{name} in {kind}", product, tensors))
    return found


def errors_by_both(kernel: Kernel, stretch: Stretch) -> tuple[ErrorTally, ErrorTally]:
    """Measure a stretch with a given kernel, in two parts, and with NumPy, by chunks of two blocks."""
    compiled, expected = CompiledErrors(kernel, chunk=_CHUNK), ErrorTally()
    length = len(stretch.value)
    middle = length // 2 // _CHUNK * _CHUNK
    for part in (slice(0, middle), slice(middle, length)):
        compiled.add(cut(stretch, part))
    for start in range(0, length, _CHUNK):
        expected.include(errors_by_numpy(stretch.chunk(start, _CHUNK)))
    return compiled.tally(), expected


def cut(stretch: Stretch, part: slice) -> Stretch:
    """Return a part of a stretch."""
    return replace(
        stretch,
        start=stretch.start + part.start,
        actual=stretch.actual[part],
        value=stretch.value[part],
        base=None if stretch.base is None else stretch.base[part],
        size=None if stretch.size is None else stretch.size[part],
    )


def hard_stretches(dtype: torch.dtype) -> list[tuple[str, Stretch]]:
    """Return stretches that are off by some roundings, by every kind of allowance; and with arbitrary values.

    Exact values are no numbers of the dtype; some are subnormal, zero, a tie between two numbers, or round to infinity.
    """
    stream = np.random.Generator(np.random.PCG64(2))
    info = torch.finfo(dtype)
    tiny = info.tiny * info.eps  # the smallest subnormal number
    exact = stream.standard_normal(_ELEMENTS) * 2.0 ** stream.integers(-4, 5, _ELEMENTS)
    size, steps = np.abs(stream.standard_normal(_ELEMENTS)) + 0.5, stream.integers(-2, 3, _ELEMENTS)
    exact[:BLOCK] *= info.tiny / 2
    special = (0.0, -0.0, 1 + info.eps / 2, 1 + 1.5 * info.eps, 2.5 * tiny)
    exact[BLOCK : BLOCK + len(special)] = special
    base = torch.from_numpy(stream.standard_normal(_ELEMENTS)).to(dtype)
    on_top = exact + base.to(torch.float64).numpy()
    alone, merged = (torch.from_numpy(numbers * (1 + steps * info.eps)).to(dtype) for numbers in (exact, on_top))
    plain = Stretch(start=7, actual=alone, value=exact)
    on_base = Stretch(start=0, actual=merged, value=exact, base=base)
    share = {"product": 3 * info.eps, "weight": 2 * info.eps, "floor": float(info.eps)}
    bounds = [Allowance(**{"product": 0.0, name: value}) for name, value in share.items()] + [Allowance(**share)]
    user = UserAllowance(atol=info.eps, rtol=2 * info.eps)
    return [
        ("errors", plain),
        ("errors over tolerances", replace(plain, size=size * info.eps)),
        ("errors over a tolerance of zero", replace(plain, size=np.where(steps == 0, 0.0, size))),
        ("errors over NaN", replace(plain, size=np.where(np.arange(_ELEMENTS) == BLOCK + 9, math.nan, size))),
        *(("deltas", replace(plain, size=size, allowance=bound)) for bound in bounds if not bound.weight),
        ("deltas by a user's tolerance", replace(plain, allowance=user)),
        *(("merged weights", replace(on_base, size=size, allowance=bound)) for bound in bounds),
        ("merged weights by a user's tolerance", replace(on_base, allowance=user)),
        *_extreme_stretches(plain, steps, size),
    ]


def _extreme_stretches(plain: Stretch, steps: np.ndarray, size: np.ndarray) -> list[tuple[str, Stretch]]:
    dtype, info = plain.actual.dtype, torch.finfo(plain.actual.dtype)
    tiny = info.tiny * info.eps
    about_zero = torch.from_numpy(np.where(steps == 0, -0.0, steps * tiny)).to(dtype)
    largest = torch.full((_CHUNK,), info.max, dtype=dtype)
    factors = 1 + np.append(info.eps * np.linspace(0, 0.5, _CHUNK - 1), 0.9)
    with np.errstate(over="ignore"):  # of float64
        beyond = np.minimum(info.max * factors, np.finfo(np.float64).max)
    twice, exact_twice = plain.actual.clone(), plain.value.copy()
    for place in (BLOCK + 7, 2 * BLOCK + 9):
        exact_twice[place], twice[place] = 3.0, 2.0
    one_infinity, exact_infinity = plain.actual.clone(), plain.value.copy()
    one_infinity[BLOCK + 3], exact_infinity[BLOCK + 3] = math.inf, beyond[-1]
    anything = torch.from_numpy(made_up(np.dtype(f"i{dtype.itemsize}"), _ELEMENTS)).view(dtype)
    wild = made_up(np.dtype(np.int64), _ELEMENTS).view(np.float64)
    wild[_CHUNK:] = anything[_CHUNK:].to(torch.float64).numpy()[::-1]
    derived = Allowance(product=3 * info.eps, weight=2 * info.eps, floor=float(info.tiny))
    return [
        ("values of both signs about zero", Stretch(start=0, actual=about_zero, value=np.roll(steps, 1) * tiny)),
        ("values beyond the largest", Stretch(start=0, actual=largest, value=beyond)),
        ("an error that comes twice", Stretch(start=0, actual=twice, value=exact_twice)),
        ("one infinity", Stretch(start=0, actual=one_infinity, value=exact_infinity)),
        ("one infinity too many", replace(plain, actual=one_infinity)),
        ("arbitrary values", Stretch(start=0, actual=anything, value=wild, size=size)),
        ("arbitrary weights", replace(plain, base=anything, size=size, allowance=derived)),
    ]


def errors_differ_in(actual: ErrorTally, expected: ErrorTally) -> str | None:
    """Return the first measure in which two paths disagree; None if they agree. Sums may be `SUMS_APART`."""
    for name in ("mismatched", "max_abs", "max_rel", "max_ulp", "ratio", "magnitude"):
        if not _same(getattr(actual, name), getattr(expected, name)):
            return name
    x, y = actual.worst, expected.worst
    if (x is None) != (y is None) or (x is not None and y is not None and x.index != y.index):
        return "worst"
    if x is not None and y is not None and not (_same(x.score, y.score) and _same(x.exact, y.exact)):
        return "worst"
    return _sums_differ_in(actual, expected)


def measure_by(
    kernel: Kernel, a: torch.Tensor, e: torch.Tensor, *, parts: int = 1, threads: int = 1, chunk: int = CHUNK
) -> Tally:
    """Measure flat, contiguous tensors of a dtype of `KINDS` with a given kernel."""
    return kernel.measure(
        name_of(a.dtype), a.data_ptr(), e.data_ptr(), a.numel(), parts=parts, threads=threads, chunk=chunk
    )


def _counts_all_bits(kernel: Kernel, dtype: torch.dtype) -> bool:
    """Check the count of flipped bits on more words than a byte can count."""
    zeros = torch.zeros(_OVERFLOWING_BYTES // dtype.itemsize, dtype=dtype)
    ones = torch.full((_OVERFLOWING_BYTES,), 255, dtype=torch.uint8).view(dtype)
    return measure_by(kernel, ones, zeros).flipped == dict.fromkeys(range(8 * dtype.itemsize), zeros.numel())


def hard_pairs(dtype: torch.dtype) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return pairs of tensors: close values, values of any size, and arbitrary bits.

    NaN on one side spoils every largest difference, so only the last pair has it. The close values differ away from
    zero, so that it matters which of the two a difference is divided by.
    """
    bits = np.dtype(f"i{dtype.itemsize}")
    stream = np.random.Generator(np.random.PCG64(1))
    numbers = torch.from_numpy(stream.standard_normal(_ELEMENTS)).to(dtype)
    steps = stream.integers(0, 4, numbers.numel()).astype(bits)
    steps[BLOCK : 2 * BLOCK] = 0  # a block that is equal
    close = (bit_patterns(numbers).numpy() + steps).view(bits)
    x, y = _pairs_of_extremes(dtype), made_up(bits, _ELEMENTS)
    anything = [torch.from_numpy(side).view(dtype) for side in (np.concatenate([x[0], y]), np.concatenate([x[1], -y]))]
    finite = [torch.where(torch.isfinite(side), side, 0) for side in anything]
    both_nan = torch.isnan(anything[0]) & torch.isnan(anything[1])
    paired = [torch.where(both_nan, side, number) for side, number in zip(anything, finite, strict=True)]
    numeric = [torch.where(torch.isnan(side), 1, side) for side in anything]
    return [
        ("close values", torch.from_numpy(close).view(dtype), numbers),
        ("finite values", finite[0], finite[1]),
        ("paired NaNs", paired[0], paired[1]),
        ("values and infinities", numeric[0], numeric[1]),
        ("arbitrary bits", anything[0], anything[1]),
    ]


def _pairs_of_extremes(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Pair zeros, subnormals, neighbouring numbers, the largest, infinities and NaNs, each with each."""
    info = torch.finfo(dtype)
    numbers = (0.0, info.tiny / 2, info.tiny, 1.0, 1.0 + info.eps, 2.0, info.max, math.inf, math.nan)
    ones = bit_patterns(torch.tensor(numbers, dtype=torch.float64).to(dtype)).numpy()
    extremes = np.concatenate([ones, ones + np.ones(1, ones.dtype)])  # the next one: NaN gets another payload
    extremes = np.concatenate([extremes, extremes | np.iinfo(ones.dtype).min])
    return np.repeat(extremes, len(extremes)), np.tile(extremes, len(extremes))


def made_up(dtype: np.dtype, count: int) -> np.ndarray:
    """Return integers of the full range, in which every bit is set and clear, including the extreme ones."""
    bounds = np.iinfo(dtype)
    stream = np.random.Generator(np.random.PCG64(0))  # torch's generators are the model's, and are left alone
    words = stream.integers(bounds.min, bounds.max, size=count, dtype=dtype.type, endpoint=True)
    words[:5] = (bounds.min, bounds.max, 0, -1, 1)
    return np.asarray(words)


def differs_in(actual: Tally, expected: Tally) -> str | None:
    """Return the first measure in which two paths disagree; None if they agree. Sums may be `SUMS_APART`."""
    for name in ("mismatched", "max_abs", "max_rel", "max_ulp", "flipped", "first", "last"):
        if not _same(getattr(actual, name), getattr(expected, name)):
            return name
    if actual.worst is not None and expected.worst is not None and actual.worst[1:] != expected.worst[1:]:
        return "worst"
    return _sums_differ_in(actual, expected)


def _sums_differ_in(actual: Tally | ErrorTally, expected: Tally | ErrorTally) -> str | None:
    for name in ("sums", "squares"):
        x, y = total(getattr(actual, name)), total(getattr(expected, name))
        if not _same(x, y) and not abs(x - y) <= SUMS_APART * abs(y):
            return name
    return None


def _same(x: object, y: object) -> bool:
    return x == y or (x != x and y != y)
