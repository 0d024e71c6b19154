"""How far one tensor is from another that should have the same bits, in one pass over chunks that stay in cache.

Nothing of the size of a tensor is allocated. The common floats are measured by the compiled kernel, on as many threads
as torch uses, where it may be trusted (`kernel.py`). What else there is, and everything where there is no kernel, NumPy
measures: equal stretches are recognised by comparing memory, and its reductions are vectorised and write into buffers
that are used again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from consistency.errors import StructureError
from consistency.numerics.bitcount import BitCount
from consistency.numerics.dtype import bit_patterns, name_of, real_view
from consistency.numerics.kernels import compiled as kernel
from consistency.numerics.kernels.tally import Seen
from consistency.numerics.real import Real
from consistency.numerics.same_bytes import same_memory
from consistency.numerics.steps import Steps, farthest

CHUNK = 1 << 15
"""Elements per chunk: what is live at a time, some 700 KiB for float32, fits in a level-2 cache of 1 MiB, and a call of
NumPy costs a tenth of what it does. Threads are no help here: a call is so short that they wait for the interpreter."""

_STRETCH = 8
"""Chunks that are compared as memory at once: of float32 1 MiB, so that a call costs little beside it."""

_SPARSE = 8
"""Where fewer than one in so many elements differ, these are gathered before they are measured."""

_NO_SIGN = getattr(torch, "float8_e8m0fnu", None)
"""Its upper bit is one of the exponent, and torch has it from 2.7 on."""

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
        On the CPU, of equal shape and dtype; neither is changed.

    Raises
    ------
    StructureError
        Shapes or dtypes differ: compare structure first.
    """
    _same_structure(actual, expected)
    a, e = real_view(actual), real_view(expected)
    parts = 2 if actual.is_complex() else 1
    return _result(_look(a, e, parts), a, e, tuple(actual.shape), parts)


def _look(a: torch.Tensor, e: torch.Tensor, parts: int) -> Seen:
    name = name_of(a.dtype)
    compiled = kernel.trusted(name) if name in kernel.KINDS and a.is_contiguous() and e.is_contiguous() else None
    if compiled is None:
        return look_by_numpy(a, e, parts)
    return look_compiled(compiled, a, e, parts, threads=torch.get_num_threads())


def look_compiled(
    compiled: kernel.Kernel, a: torch.Tensor, e: torch.Tensor, parts: int, *, threads: int, chunk: int = kernel.CHUNK
) -> Seen:
    """Look at flat, contiguous tensors of a dtype of `kernel.KINDS`."""
    ranges, sums = compiled.measure(
        name_of(a.dtype), a.data_ptr(), e.data_ptr(), a.numel(), parts=parts, threads=threads, chunk=chunk
    )  # fmt: skip
    found = Seen(sums=sums[0].tolist(), squares=sums[1].tolist())
    flips = np.zeros(64, np.int64)
    for start, seen in ranges:
        if not seen.mismatched:
            continue
        found.mismatched += seen.mismatched
        found.max_abs, found.max_rel = worse(found.max_abs, seen.max_abs), worse(found.max_rel, seen.max_rel)
        found.max_ulp = max(found.max_ulp or 0, seen.max_ulp)
        found.first = start + seen.first if found.first is None else found.first
        found.last = start + seen.last
        if found.worst is None or is_worse(seen.max_abs, found.worst[0]):
            found.worst = (seen.max_abs, start + seen.worst)
        flips += np.ctypeslib.as_array(seen.flips)
    if math.isnan(found.max_abs):  # NaN on one side alone has no place in the order
        found.max_ulp = None
    found.flipped = {bit: count for bit, count in enumerate(flips.tolist()) if count}
    return found


def look_by_numpy(a: torch.Tensor, e: torch.Tensor, parts: int) -> Seen:
    """Look at flat real tensors of any dtype."""
    stop = a.numel()
    found, bits = Seen(), BitCount(8 * a.element_size())
    x, y = bit_patterns(a).numpy(), bit_patterns(e).numpy()
    differing = -1
    with np.errstate(all="ignore"):  # NaN and infinities are settled below
        for stretch in range(0, stop, _STRETCH * CHUNK):
            end = min(stop, stretch + _STRETCH * CHUNK)
            if same_memory(x[stretch:end], y[stretch:end]):
                continue
            for chunk in range(stretch, end, CHUNK):
                part = slice(chunk, min(end, chunk + CHUNK))
                if _see(found, bits, a[part], e[part], x[part], y[part], chunk, parts):
                    differing = chunk
        if differing >= 0:
            part = slice(differing, min(stop, differing + CHUNK))
            found.last = differing + int(np.flatnonzero(x[part] != y[part])[-1])
    found.flipped = bits.result()
    return found


def _see(
    found: Seen,
    flipped: BitCount,
    a: torch.Tensor,
    e: torch.Tensor,
    x: np.ndarray,
    y: np.ndarray,
    start: int,
    parts: int,
) -> bool:
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
    difference = None
    if numbers.dtype == np.float32:
        difference = _exact_in_float32(found, numbers, reference, farthest(x, y), torch.finfo(a.dtype).eps)
    if difference is None:
        bits = (part.astype(np.int16) for part in (x, y, flips)) if a.dtype == _NO_SIGN else (x, y, flips)
        steps = Steps.between(*bits) if a.dtype.is_floating_point else None
        difference = _in_float64(found, numbers, reference, steps)
    largest = float(difference.max())  # NaN is the largest
    if found.worst is None or is_worse(largest, found.worst[0]):
        # argmax takes the first NaN; where bits differ and no number does, the first of them is shown
        i = int(np.argmax(difference if largest != 0 else differs))
        where = start + (i if places is None else int(places[i]))
        found.worst = (largest, where)
    flipped.add(flips)  # takes the array over
    return True


def _exact_in_float32(
    found: Seen, numbers: np.ndarray, reference: np.ndarray, apart: int, eps: float
) -> np.ndarray | None:
    """Add a chunk in which each pair is within a factor of two, and return |a - e| in float32; else None.

    Such a difference is exact in the numbers' own format (Sterbenz, *Floating-Point Computation*, 1974, theorem 4.3.1),
    so nothing is lost, and float32 is twice as fast as float64. Bits that are less than an exponent apart are those of
    numbers of one sign within a factor of two; but for NaN and infinity, which the largest difference tells.
    """
    if apart * eps >= 1:
        return None
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
        found.max_ulp = max(found.max_ulp, apart)
    return difference


def _in_float64(found: Seen, numbers: np.ndarray, reference: np.ndarray, steps: Steps | None) -> np.ndarray:
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
    """Return the sum of the squares of a chunk; NumPy's own, for a BLAS may start threads, which spin against ours."""
    return float(np.einsum("i,i->", values, values))


def _largest_relative(difference: np.ndarray, reference: np.ndarray) -> float:
    relative = np.divide(difference, np.abs(reference), dtype=np.float64)
    largest = float(np.maximum.reduce(relative))
    if math.isnan(largest):
        relative[difference == 0] = 0.0
        relative[np.isinf(difference)] = math.inf  # not NaN where the reference is infinite too
        largest = float(np.maximum.reduce(relative))
    return largest


def _result(seen: Seen, a: torch.Tensor, e: torch.Tensor, shape: tuple[int, ...], parts: int) -> Measure:
    elements = math.prod(shape)
    size, worst = a.element_size(), None if seen.worst is None else seen.worst[1]
    return Measure(
        elements=elements,
        mismatched=seen.mismatched,
        max_abs=Real(seen.max_abs),
        mean_abs=Real(total(seen.sums) / max(1, elements)),
        rms=Real(math.sqrt(total(seen.squares) / max(1, elements))),
        max_rel=Real(seen.max_rel),
        max_ulp=seen.max_ulp,
        worst_index=None if worst is None else unravel(worst // parts, shape),
        worst_actual=None if worst is None else Real(float(a[worst])),
        worst_expected=None if worst is None else Real(float(e[worst])),
        worst_actual_bits=None if worst is None else hexadecimal(a[worst]),
        worst_expected_bits=None if worst is None else hexadecimal(e[worst]),
        flipped_bits=seen.flipped,
        first_byte=None if seen.first is None else seen.first * size,
        last_byte=None if seen.last is None else seen.last * size,
    )


def total(values: list[float]) -> float:
    """Add sums that are not negative; NaN and infinity stay what they are."""
    if any(math.isnan(v) for v in values):
        return math.nan
    return math.inf if math.inf in values else math.fsum(values)


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
