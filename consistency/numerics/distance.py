"""How far one tensor is from another, or from an exact reference, in one pass over chunks that stay in cache."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch

from consistency.errors import StructureError
from consistency.numbers import Real
from consistency.numerics.dtype import bit_patterns, name_of, ordered_integers, real_view

CHUNK = 1 << 14
"""Elements per chunk: a handful of float64 temporaries of 128 KiB fit in a level-2 cache of 1 MiB."""

_HAVE_AMINMAX = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32})


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
        Largest magnitude of the reference.
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
    tally = Tally(shape=tuple(actual.shape), dtype=a.dtype, parts=2 if actual.is_complex() else 1)
    ab, eb = bit_patterns(a), bit_patterns(e)
    for start in range(0, a.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        tally.see_magnitude(e[part])
        if not torch.equal(ab[part], eb[part]):
            tally.add_bits(a[part], e[part], start=start)
    return tally.result()


class Tally:
    """Accumulate a `Measure` chunk by chunk.

    Parameters
    ----------
    shape : tuple of int
    dtype : torch.dtype
        Of the real parts.
    parts : int
        Real parts per element: 2 for a complex tensor.
    """

    def __init__(self, *, shape: tuple[int, ...], dtype: torch.dtype, parts: int = 1) -> None:
        self._shape = shape
        self._dtype = dtype
        self._parts = parts
        self._elements = math.prod(shape)
        self._mismatched = 0
        self._max_abs = self._max_rel = self._sum = self._squares = self._magnitude = 0.0
        self._max_ulp: int | None = 0
        self._ratio: float | None = None
        self._worst: tuple[float, int, float, float, str, str] | None = None
        self._bits: Counter[int] = Counter()
        self._first: int | None = None
        self._last: int | None = None

    def see_magnitude(self, expected: torch.Tensor) -> None:
        """Note the largest finite magnitude of a chunk of the reference."""
        if expected.dtype == torch.bool or not expected.numel():
            return
        numbers = expected if expected.dtype in _HAVE_AMINMAX else expected.to(torch.float64)
        low, high = torch.aminmax(numbers)
        if not (math.isfinite(low) and math.isfinite(high)):
            low, high = torch.aminmax(numbers.masked_fill(~torch.isfinite(numbers), 0.0))
        self._magnitude = max(self._magnitude, abs(float(low)), abs(float(high)))

    def add_bits(self, actual: torch.Tensor, expected: torch.Tensor, *, start: int) -> None:
        """Add a chunk of a bitwise comparison; `start` is the flat index of its first element."""
        ab, eb = bit_patterns(actual), bit_patterns(expected)
        places = torch.nonzero(ab != eb).reshape(-1)
        a, e = actual[places], expected[places]
        flips = torch.bitwise_xor(ab[places], eb[places]).to(torch.int64)
        for bit in range(8 * actual.element_size()):
            count = int(torch.count_nonzero(torch.bitwise_and(flips, 1 << bit if bit < 63 else -(1 << 63))))
            if count:
                self._bits[bit] += count
        size = actual.element_size()
        self._first = (start + int(places[0])) * size if self._first is None else self._first
        self._last = (start + int(places[-1])) * size
        if self._parts > 1:
            self._mismatched += int(torch.unique((places + start) // self._parts).numel())
        else:
            self._mismatched += places.numel()
        difference = self._difference(a.to(torch.float64), e.to(torch.float64))
        self._see(a, e, difference, difference, places + start)

    def add_error(self, actual: torch.Tensor, exact: torch.Tensor, *, allowed: torch.Tensor | None, start: int) -> None:
        """Add a chunk of a comparison with an exact reference.

        Parameters
        ----------
        actual : torch.Tensor
            Flat, of the tested dtype.
        exact : torch.Tensor
            Flat float64.
        allowed : torch.Tensor or None
            Flat float64, what each element may be off, above zero.
        start : int
            Flat index of the chunk's first element.
        """
        rounded = exact.to(self._dtype)
        self.see_magnitude(exact)
        difference = self._difference(actual.to(torch.float64), exact)
        # what rounds to the same bits is as right as this dtype can be, where it overflows to infinity too
        same = bit_patterns(actual) == bit_patterns(rounded)
        difference.masked_fill_(same & ~torch.isfinite(difference), 0.0)
        self._mismatched += actual.numel() - int(torch.count_nonzero(same))
        badness = difference
        if allowed is not None:
            badness = difference / allowed
            badness.masked_fill_(difference == 0, 0.0)  # 0 / 0 where nothing is allowed and nothing is off
            self._ratio = _worse(self._ratio or 0.0, float(badness.max()))
        self._see(actual, exact, difference, badness, None, start=start, rounded=rounded)

    def result(self) -> Measure:
        n = max(1, self._elements)
        worst = self._worst
        return Measure(
            elements=self._elements,
            mismatched=self._mismatched,
            max_abs=Real(self._max_abs),
            mean_abs=Real(self._sum / n),
            rms=Real(math.sqrt(self._squares / n) if not math.isnan(self._squares) else math.nan),
            max_rel=Real(self._max_rel),
            max_ulp=self._max_ulp,
            bound_ratio=None if self._ratio is None else Real(self._ratio),
            worst_index=None if worst is None else _unravel(worst[1] // self._parts, self._shape),
            worst_actual=None if worst is None else Real(worst[2]),
            worst_expected=None if worst is None else Real(worst[3]),
            worst_actual_bits=None if worst is None else worst[4],
            worst_expected_bits=None if worst is None else worst[5],
            flipped_bits=dict(sorted(self._bits.items())),
            first_byte=self._first,
            last_byte=self._last,
            magnitude=Real(self._magnitude),
        )

    def _difference(self, a: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        """Return |a - e|; 0 for equal infinities and for paired NaNs, NaN where one side alone is NaN."""
        difference = (a - e).abs_()
        if not bool(torch.isfinite(difference).all()):
            difference.masked_fill_((a == e) | (torch.isnan(a) & torch.isnan(e)), 0.0)
        return difference

    def _see(
        self,
        a: torch.Tensor,
        e: torch.Tensor,
        difference: torch.Tensor,
        badness: torch.Tensor,
        places: torch.Tensor | None,
        *,
        start: int = 0,
        rounded: torch.Tensor | None = None,
    ) -> None:
        if not a.numel():
            return
        self._max_abs = _worse(self._max_abs, float(difference.max()))
        self._sum += float(difference.sum())
        self._squares += float(torch.dot(difference, difference))
        relative = difference / e.to(torch.float64).abs()
        relative.masked_fill_(difference == 0, 0.0)
        relative.masked_fill_(torch.isinf(difference), math.inf)  # not NaN where the reference is infinite too
        self._max_rel = _worse(self._max_rel, float(relative.max()))
        near = e if rounded is None else rounded
        self._see_ulp(a, near, difference)
        i = int(torch.argmax(badness))  # NaN counts as the largest
        score = float(badness[i])
        if self._worst is None and score == 0 and rounded is not None:
            return  # an exact result has no worst element
        if self._worst is None or _is_worse(score, self._worst[0]):
            where = start + i if places is None else int(places[i])
            self._worst = (score, where, float(a[i]), float(e[i]), _hex(a[i]), _hex(near[i]))

    def _see_ulp(self, a: torch.Tensor, e: torch.Tensor, difference: torch.Tensor) -> None:
        if self._max_ulp is None or not a.dtype.is_floating_point:
            self._max_ulp = None
            return
        if bool(torch.isnan(difference).any()):
            self._max_ulp = None
            return
        x, y = ordered_integers(a), ordered_integers(e)
        both_nan = torch.isnan(a) & torch.isnan(e)
        # two float64 of opposite sign can be further apart than int64 reaches: the difference wraps and is read as
        # unsigned, in whose order a value comes where its sign-flipped bits come in the signed one
        apart = (torch.maximum(x, y) - torch.minimum(x, y)).masked_fill_(both_nan, 0)
        step = int(torch.bitwise_xor(apart, -(1 << 63)).max()) + (1 << 63)
        self._max_ulp = max(self._max_ulp, step)


def _same_structure(actual: torch.Tensor, expected: torch.Tensor) -> None:
    if actual.shape != expected.shape:
        raise StructureError("shapes differ", got=tuple(actual.shape), wanted=tuple(expected.shape))
    if actual.dtype != expected.dtype:
        raise StructureError("dtypes differ", got=name_of(actual.dtype), wanted=name_of(expected.dtype))


def _worse(a: float, b: float) -> float:
    """Return the larger; NaN is larger than any number."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _is_worse(a: float, b: float) -> bool:
    return (math.isnan(a) and not math.isnan(b)) or a > b


def _hex(element: torch.Tensor) -> str:
    flat = element.reshape(1)
    value = int(bit_patterns(flat)[0]) & ((1 << (8 * flat.element_size())) - 1)
    return f"0x{value:0{2 * flat.element_size()}x}"


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        out.append(place)
    return tuple(reversed(out))
