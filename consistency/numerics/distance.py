"""How far one tensor is from another that should have the same bits, in one pass over chunks that stay in cache.

Equal stretches are recognised by comparing memory. Where bits differ, NumPy measures on the CPU: its reductions are
vectorised and can write into buffers that are used again, so nothing of the size of a tensor is allocated.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
from dataclasses import dataclass, field

import numpy as np
import torch

from consistency.errors import StructureError
from consistency.numbers import Real
from consistency.numerics.bitcount import BitCount
from consistency.numerics.dtype import bit_patterns, name_of, real_view
from consistency.numerics.memory import same_memory
from consistency.numerics.steps import Steps

CHUNK = 1 << 14
"""Elements per chunk: the float64 and integer buffers, some 500 KiB, fit in a level-2 cache of 1 MiB."""

_STRETCH = 16
"""Chunks that are compared as memory at once: of float32 1 MiB, so that a call costs little beside it."""

_SPARSE = 8
"""Where fewer than one in so many elements differ, these are gathered before they are measured."""

_DIRECT = frozenset({torch.float64, torch.float32})  # NumPy has no bfloat16 and is slow at float16


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How far a tensor is from its reference. Raw numbers; rounding happens where they are shown.

    Attributes
    ----------
    elements, mismatched : int
        All elements, and those whose bits differ from the reference (an exact one is first rounded to the dtype).
    max_abs, mean_abs, rms : float
        Of the difference, in the tensors' own unit, in float64. NaN where one side alone is NaN.
    max_rel : float
        Largest difference over the magnitude of the reference; infinite where that is zero or the difference infinite.
    max_ulp : int or None
        In units in the last place of the dtype; None where it is not defined (NaN on one side, no float).
    bound_ratio : float or None
        Largest difference over what is allowed for that element; None for a bitwise rule.
    worst_index : tuple of int or None
        Index of the element that is worst by `bound_ratio`, or by difference; None where all bits are equal.
    worst_actual, worst_expected : float or None
    worst_actual_bits, worst_expected_bits : str or None
        Hexadecimal, most significant digit first.
    flipped_bits : dict of int to int
        For a bitwise comparison: how many elements differ in that bit; 0 is the least significant.
    first_byte, last_byte : int or None
        Offsets of the first and the last element that differs, in bytes from the start of the tensor.
    magnitude : float
        Largest finite magnitude of an exact reference; not taken where bits are compared.
    """

    elements: int
    mismatched: int = 0
    max_abs: Real = Real(0.0)
    mean_abs: Real = Real(0.0)
    rms: Real = Real(0.0)
    max_rel: Real = Real(0.0)
    max_ulp: int | None = 0
    bound_ratio: Real | None = None
    worst_index: tuple[int, ...] | None = None
    worst_actual: Real | None = None
    worst_expected: Real | None = None
    worst_actual_bits: str | None = None
    worst_expected_bits: str | None = None
    flipped_bits: dict[int, int] = field(default_factory=dict)
    first_byte: int | None = None
    last_byte: int | None = None
    magnitude: Real = Real(0.0)


def measure(actual: torch.Tensor, expected: torch.Tensor) -> Measure:
    """Measure how far `actual` is from `expected`, bit by bit and as numbers.

    Parameters
    ----------
    actual, expected : torch.Tensor
        On the CPU, of equal shape and dtype; neither is changed. As many threads work as torch uses.

    Raises
    ------
    StructureError
        Shapes or dtypes differ: compare structure first.
    """
    _same_structure(actual, expected)
    a, e = real_view(actual), real_view(expected)
    parts = 2 if actual.is_complex() else 1
    stretch = _STRETCH * CHUNK
    threads = min(torch.get_num_threads(), -(-a.numel() // stretch))
    if threads < 2:
        found = [_measure_range(a, e, 0, a.numel(), parts)]
    else:
        # whole stretches per thread, so that how a tensor is cut does not depend on how many threads there are
        step = -(-a.numel() // stretch // threads) * stretch
        ranges = [(start, min(start + step, a.numel())) for start in range(0, a.numel(), step)]
        found = list(_pool(threads).map(lambda cut: _measure_range(a, e, cut[0], cut[1], parts), ranges))
    return _combined(found, tuple(actual.shape), parts)


@dataclass(slots=True, kw_only=True)
class _Range:
    """What one thread has seen of a contiguous range of elements."""

    mismatched: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int | None = 0
    sums: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    bits: BitCount
    first: int | None = None
    last: int | None = None
    worst: tuple[float, int, float, float, str, str] | None = None


def _measure_range(a: torch.Tensor, e: torch.Tensor, start: int, stop: int, parts: int) -> _Range:
    found = _Range(bits=BitCount(8 * a.element_size()))
    x, y = bit_patterns(a).numpy(), bit_patterns(e).numpy()
    differing = -1
    with np.errstate(all="ignore"):  # NaN and infinities are settled below
        for stretch in range(start, stop, _STRETCH * CHUNK):
            end = min(stop, stretch + _STRETCH * CHUNK)
            if same_memory(x[stretch:end], y[stretch:end]):
                continue
            for chunk in range(stretch, end, CHUNK):
                part = slice(chunk, min(end, chunk + CHUNK))
                if _see(found, a[part], e[part], x[part], y[part], chunk, parts):
                    differing = chunk
        if differing >= 0:
            part = slice(differing, min(stop, differing + CHUNK))
            found.last = differing + int(np.flatnonzero(x[part] != y[part])[-1])
    return found


def _see(found: _Range, a: torch.Tensor, e: torch.Tensor, x: np.ndarray, y: np.ndarray, start: int, parts: int) -> bool:
    """Add a chunk, `x` and `y` the bits of `a` and `e`; tell whether it has a difference."""
    differs = np.not_equal(x, y)
    count = int(np.count_nonzero(differs))
    if count == 0:
        return False
    if found.first is None:
        found.first = start + int(np.argmax(differs))
    found.mismatched += count if parts == 1 else int(np.count_nonzero(differs[0::2] | differs[1::2]))
    places = None
    if count * _SPARSE < len(differs):
        places = np.flatnonzero(differs)
        a, e, x, y, differs = a[places], e[places], x[places], y[places], differs[places]
    flips = np.bitwise_xor(x, y)
    numbers, reference = numbers_of(a), numbers_of(e)
    steps = Steps.between(x, y, flips) if a.dtype.is_floating_point else None
    difference = None
    if steps is not None and steps.within(a.dtype) and numbers.dtype == np.float32:
        difference = _exact_in_float32(found, numbers, reference, steps)
    if difference is None:
        difference = _in_float64(found, numbers, reference, steps)
    largest = float(difference.max())  # NaN is the largest
    if found.worst is None or is_worse(largest, found.worst[0]):
        # argmax takes the first NaN; where bits differ and no number does, the first of them is shown
        i = int(np.argmax(difference if largest != 0 else differs))
        where = start + (i if places is None else int(places[i]))
        found.worst = (largest, where, float(a[i]), float(e[i]), hexadecimal(a[i]), hexadecimal(e[i]))
    found.bits.add(flips)  # takes the array over
    return True


def _exact_in_float32(found: _Range, numbers: np.ndarray, reference: np.ndarray, steps: Steps) -> np.ndarray | None:
    """Add a chunk in which each pair is within a factor of two, and return |a - e| in float32; None where NaN is in it.

    Such a difference is exact in the numbers' own format (Sterbenz, *Floating-Point Computation*, 1974, theorem 4.3.1),
    so nothing is lost, and float32 is twice as fast as float64.
    """
    difference: np.ndarray = np.subtract(numbers, reference)
    np.abs(difference, out=difference)
    largest = float(np.maximum.reduce(difference))
    if not math.isfinite(largest):
        return None
    wide = difference.astype(np.float64)
    found.sums.append(float(np.add.reduce(wide)))
    found.squares.append(square_sum(wide))
    found.max_abs = worse(found.max_abs, largest)
    size = np.abs(reference)
    relative = np.divide(difference, size)
    limit = float(np.fmax.reduce(relative)) * (1 - 2.0**-22)  # a quotient in float32 is off by 2**-24 at most
    if limit * (1 + 2.0**-21) > found.max_rel:
        near = np.flatnonzero(relative >= limit)
        quotients = wide[near] / size[near].astype(np.float64)
        found.max_rel = worse(found.max_rel, float(quotients.max()))
    if found.max_ulp is not None:
        found.max_ulp = max(found.max_ulp, steps.largest)
    return difference


def _in_float64(found: _Range, numbers: np.ndarray, reference: np.ndarray, steps: Steps | None) -> np.ndarray:
    """Add a chunk of any numbers, and return |a - e|: 0 for equal infinities and for paired NaNs."""
    difference: np.ndarray = np.subtract(numbers, reference, dtype=np.float64)
    np.abs(difference, out=difference)
    total = float(np.add.reduce(difference))
    both_nan = None
    if not math.isfinite(total):
        both_nan = np.isnan(numbers) & np.isnan(reference)
        difference[(numbers == reference) | both_nan] = 0.0
        total = float(np.add.reduce(difference))
    largest = float(np.maximum.reduce(difference))
    found.sums.append(total)
    found.squares.append(square_sum(difference))
    found.max_abs = worse(found.max_abs, largest)
    found.max_rel = worse(found.max_rel, _largest_relative(difference, reference))
    if steps is None or math.isnan(largest):
        found.max_ulp = None
    elif found.max_ulp is not None:
        found.max_ulp = max(found.max_ulp, steps.largest if both_nan is None else steps.without(both_nan))
    return difference


def numbers_of(part: torch.Tensor) -> np.ndarray:
    """Return a flat real tensor as NumPy numbers that are exact in float64, but for integers beyond 2**53."""
    if part.dtype in _DIRECT:
        return part.numpy()
    return part.to(torch.float32 if part.dtype.is_floating_point else torch.float64).numpy()


def square_sum(values: np.ndarray) -> float:
    """Return the sum of the squares of a chunk."""
    # in pieces of 8192: from 10,000 on OpenBLAS starts threads, which spin against ours
    pieces = (values[start : start + 8192] for start in range(0, len(values), 8192))
    return math.fsum(float(np.dot(piece, piece)) for piece in pieces)


def _largest_relative(difference: np.ndarray, reference: np.ndarray) -> float:
    relative = np.divide(difference, np.abs(reference), dtype=np.float64)
    largest = float(np.maximum.reduce(relative))
    if math.isnan(largest):
        relative[difference == 0] = 0.0
        relative[np.isinf(difference)] = math.inf  # not NaN where the reference is infinite too
        largest = float(np.maximum.reduce(relative))
    return largest


def _combined(found: list[_Range], shape: tuple[int, ...], parts: int) -> Measure:
    """Put the ranges of a tensor together; `math.fsum` gives one sum however they were cut."""
    elements = math.prod(shape)
    bits = found[0].bits
    worst = found[0].worst
    for other in found[1:]:
        bits.merge(other.bits)
        if other.worst is not None and (worst is None or is_worse(other.worst[0], worst[0])):
            worst = other.worst
    steps = [r.max_ulp for r in found]
    size = bits.bits // 8
    firsts = [r.first for r in found if r.first is not None]
    lasts = [r.last for r in found if r.last is not None]
    return Measure(
        elements=elements,
        mismatched=sum(r.mismatched for r in found),
        max_abs=Real(functools.reduce(worse, (r.max_abs for r in found))),
        mean_abs=Real(_sum([s for r in found for s in r.sums]) / max(1, elements)),
        rms=Real(math.sqrt(_sum([s for r in found for s in r.squares]) / max(1, elements))),
        max_rel=Real(functools.reduce(worse, (r.max_rel for r in found))),
        max_ulp=None if None in steps else max(s for s in steps if s is not None),
        worst_index=None if worst is None else unravel(worst[1] // parts, shape),
        worst_actual=None if worst is None else Real(worst[2]),
        worst_expected=None if worst is None else Real(worst[3]),
        worst_actual_bits=None if worst is None else worst[4],
        worst_expected_bits=None if worst is None else worst[5],
        flipped_bits=bits.result(),
        first_byte=firsts[0] * size if firsts else None,
        last_byte=lasts[-1] * size if lasts else None,
    )


def _sum(values: list[float]) -> float:
    if any(math.isnan(v) for v in values):
        return math.nan
    return math.inf if math.inf in values else math.fsum(values)


@functools.cache
def _pool(threads: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="measure")


def worse(a: float, b: float) -> float:
    """Return the larger; NaN is larger than any number."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def is_worse(a: float, b: float) -> bool:
    """Tell whether a is larger than b; NaN is larger than any number."""
    return (math.isnan(a) and not math.isnan(b)) or a > b


def hexadecimal(element: torch.Tensor) -> str:
    """Return the bits of one element, most significant digit first."""
    flat = element.reshape(1)
    value = int(bit_patterns(flat)[0]) & ((1 << (8 * flat.element_size())) - 1)
    return f"0x{value:0{2 * flat.element_size()}x}"


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index in each dimension of a flat index."""
    out = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        out.append(place)
    return tuple(reversed(out))


def _same_structure(actual: torch.Tensor, expected: torch.Tensor) -> None:
    if actual.shape != expected.shape:
        raise StructureError("shapes differ", got=tuple(actual.shape), wanted=tuple(expected.shape))
    if actual.dtype != expected.dtype:
        raise StructureError("dtypes differ", got=name_of(actual.dtype), wanted=name_of(expected.dtype))
