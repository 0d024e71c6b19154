"""Diagnose a difference between a tensor and the bytes that it should hold.

Rules are tried from the most to the least specific; `differs` is an honest answer. Each reads the tensor in chunks and
stops at the first that contradicts it, so a rule that does not apply costs little, and nothing of the size of a tensor
is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from consistency.numerics import words
from consistency.numerics.diagnosis import (
    FEW_ELEMENTS,
    ROUNDINGS,
    Diagnosis,
    bit_flip,
    block,
    byte_range,
    first_answer,
    non_finite,
)
from consistency.numerics.digest import digest
from consistency.numerics.dtype import bit_patterns, elements, real_view
from consistency.numerics.measure import Measure
from consistency.numerics.words import Word

_BELOW_TF32 = (1 << 13) - 1
"""Bits of a float32 that TF32 cuts off; float16 and bfloat16 keep no more than its 10 mantissa bits."""

_FIRST, _CHUNK = 1 << 10, 1 << 16
"""Elements of the first chunk, and of each further one."""

_SAMPLE = 1001
"""Number of ratios whose median is taken: if all ratios are equal, any few have the same median."""


def _find_nothing(_: torch.Tensor) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherContents:
    """Other contents that a tensor may hold instead of its bytes."""

    poison: int | None = None
    """Bit pattern of the elements before the bytes were written."""
    initial: str | None = None
    """Digest of the tensor before anything was loaded into it."""
    swapped: Callable[[torch.Tensor], str | None] = _find_nothing
    """Returns the name of another tensor of the run whose reference has the bytes of the given tensor; else None."""
    stale: Callable[[torch.Tensor], str | None] = _find_nothing
    """Returns the name of earlier contents of the memory, another adapter or run with these bytes; else None."""


def diagnose_structure(actual: torch.Tensor, expected: torch.Tensor) -> Diagnosis | None:
    """Compare shape and dtype, before any value; None where both are equal."""
    if actual.shape != expected.shape:
        return Diagnosis(word=words.SHAPE, evidence={"got": list(actual.shape), "wanted": list(expected.shape)})
    if actual.dtype != expected.dtype:
        return Diagnosis(word=words.DTYPE, evidence={"got": str(actual.dtype), "wanted": str(expected.dtype)})
    return None


def diagnose_moved(
    actual: torch.Tensor, expected: torch.Tensor, measure: Measure, *, other_contents: OtherContents | None = None
) -> Diagnosis:
    """Diagnose a tensor whose bytes were only moved.

    Parameters
    ----------
    actual, expected : torch.Tensor
        On the CPU, of equal shape and dtype. If their bits are equal there is nothing to diagnose: `differs`.
    measure : Measure
        How far `actual` is from `expected`.
    other_contents : OtherContents, optional
        Other contents that the tensor may hold.
    """
    if measure.mismatched == 0:
        return Diagnosis(word=words.DIFFERS)
    other_contents = other_contents or OtherContents()
    pair = _Pair(actual, expected, measure)
    # NaN and infinity come twice: before the rules on values where nothing else is wrong, and after them
    answer = first_answer(
        (
            lambda: _never_written(pair, other_contents.poison),
            lambda: _zeros(pair),
            lambda: _fresh_init(pair, other_contents.initial),
            lambda: _holds(pair, words.SWAPPED, other_contents.swapped),
            lambda: _holds(pair, words.STALE, other_contents.stale),
            lambda: _signed_zero(pair),
            lambda: _permuted(pair),
            lambda: _bit_flip(pair),
            lambda: _non_finite(pair, alone=True),
            lambda: _rounded(pair),
            lambda: _wrong_scale(pair),
            lambda: block(*pair.ends(), wrong=measure.mismatched, elements=measure.elements, size=pair.number_bytes),
            lambda: _non_finite(pair, alone=False),
        )
    )
    return answer or Diagnosis(word=words.DIFFERS)


class _Pair:
    """Two tensors as flat chunks: their values and their bits.

    Attributes
    ----------
    actual, expected : torch.Tensor
        As they were given.
    measure : Measure
        How far one is from the other.
    a, e : torch.Tensor
        Flat views of both with real elements.
    x, y : torch.Tensor
        The bits of these, as integers.
    parts : int
        Real elements of a number: 2 where it is complex, else 1.
    number_bytes : int
        Bytes of a number.
    """

    def __init__(self, actual: torch.Tensor, expected: torch.Tensor, measure: Measure) -> None:
        self.actual, self.expected, self.measure = actual, expected, measure
        self.a, self.e = real_view(actual), real_view(expected)
        self.x, self.y = bit_patterns(self.a), bit_patterns(self.e)
        self.parts = 2 if actual.is_complex() else 1
        self.number_bytes = actual.element_size()

    def ends(self) -> tuple[int, int]:
        """Return the first and the last number that differ."""
        first, last = self.measure.first_byte, self.measure.last_byte
        assert first is not None
        assert last is not None
        return first // self.number_bytes, last // self.number_bytes

    def chunks(self) -> Iterator[slice]:
        """Yield slices of real elements that cover the tensors."""
        return _slices(0, self.a.numel())

    def differing(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the slices in which elements differ, each with a mask of these elements."""
        first, last = self.ends()
        for part in _slices(first * self.parts, (last + 1) * self.parts):
            differs = self.x[part] != self.y[part]
            if bool(differs.any()):
                yield part, differs


def _slices(start: int, stop: int) -> Iterator[slice]:
    """Cut a range into slices, a small one first: it contradicts most rules that do not apply."""
    small = min(stop, start + _FIRST)
    yield slice(start, small)
    for first in range(small, stop, _CHUNK):
        yield slice(first, min(stop, first + _CHUNK))


def _never_written(pair: _Pair, poison: int | None) -> Diagnosis | None:
    """Report that the bytes never arrived: every element that differs has the bits from before the write."""
    if poison is None:
        return None
    for part, differs in pair.differing():
        if not bool(torch.all(pair.x[part][differs] == poison)):
            return None
    evidence = {"elements": pair.measure.mismatched, "of": pair.measure.elements}
    if pair.measure.mismatched < pair.measure.elements:
        evidence |= byte_range(*pair.ends(), elements=pair.measure.elements, size=pair.number_bytes)
    return Diagnosis(word=words.NEVER_WRITTEN, evidence=evidence)


def _zeros(pair: _Pair) -> Diagnosis | None:
    """Report that every bit of the tensor is zero."""
    for part in pair.chunks():
        if bool(torch.any(pair.x[part] != 0)):
            return None
    nonzero = sum(int(torch.count_nonzero(pair.y[part])) for part in pair.chunks())
    return Diagnosis(word=words.ZEROS, evidence={"nonzero_in_reference": nonzero})


def _fresh_init(pair: _Pair, initial: str | None) -> Diagnosis | None:
    """Report that the tensor is as it was before the file was loaded, by its digest from then."""
    if initial is None or digest(pair.actual).value != initial:
        return None
    return Diagnosis(word=words.FRESH_INIT, evidence={"holds": "its value before the file was loaded"})


def _holds(pair: _Pair, word: Word, find: Callable[[torch.Tensor], str | None]) -> Diagnosis | None:
    """Report by `word` that the tensor holds the bytes that `find` names."""
    name = find(pair.actual)
    return None if name is None else Diagnosis(word=word, evidence={"holds": name})


def _signed_zero(pair: _Pair) -> Diagnosis | None:
    """Report that all elements that differ are zeros of opposite signs."""
    if not pair.a.dtype.is_floating_point or float(pair.measure.max_abs) != 0:  # the distance between two zeros is 0
        return None
    for part, differs in pair.differing():
        for tensor in (pair.a, pair.e):
            if bool(torch.any(elements(tensor[part], differs) != 0)):
                return None
    return Diagnosis(word=words.SIGNED_ZERO, evidence={"elements": pair.measure.mismatched})


def _bit_flip(pair: _Pair) -> Diagnosis | None:
    """Report flipped bits where a few elements differ, each in one bit."""
    measure = pair.measure
    if measure.mismatched > FEW_ELEMENTS or sum(measure.flipped_bits.values()) != measure.mismatched:
        return None
    all_bits = (1 << (8 * pair.a.element_size())) - 1  # a negative Python integer has no end of leading ones
    for part, differs in pair.differing():
        flips = torch.bitwise_xor(pair.x[part][differs], pair.y[part][differs]).tolist()
        if any((flip & all_bits).bit_count() != 1 for flip in flips):
            return None
    evidence = {"elements": measure.mismatched, "index": list(measure.worst_index or ())}
    return bit_flip(pair.a.dtype, measure.flipped_bits, evidence)


def _non_finite(pair: _Pair, *, alone: bool) -> Diagnosis | None:
    """Report NaN or infinity where the reference is finite; with `alone`, only if every difference is of that kind."""
    if not pair.a.dtype.is_floating_point or math.isfinite(pair.measure.max_abs):
        return None
    nan = inf = 0
    for part, differs in pair.differing():
        actual, expected = (elements(tensor[part], differs).to(torch.float64) for tensor in (pair.a, pair.e))
        broken = ~torch.isfinite(actual) & torch.isfinite(expected)
        if alone and not bool(broken.all()):
            return None
        nan += int(torch.isnan(actual[broken]).sum())
        inf += int(torch.isinf(actual[broken]).sum())
    return non_finite(nan, inf)


def _permuted(pair: _Pair) -> Diagnosis | None:
    """Report that the tensor has the right elements in another order, or whole rows in another order."""
    if not _same_multiset(pair):
        return None
    # digests of the rows are compared only now that the elements are known to be the same
    rows = _moved_rows(pair) if pair.actual.dim() > 1 else None
    if rows is None:
        return Diagnosis(word=words.PERMUTED, evidence={"of": "elements"})
    return Diagnosis(word=words.PERMUTED, evidence={"of": "rows", "rows": rows[:8], "count": len(rows)})


def _same_multiset(pair: _Pair) -> bool:
    """Return whether both hold the same elements in some order, by sums that do not depend on the order.

    If so, each bit is set as often on both sides and flips an even number of times, which rules out most tensors. Then
    each element is mixed by splitmix64's finalizer (Steele et al., "Fast splittable pseudorandom number generators",
    2014) under two seeds: 128 bits, which do not collide by chance.
    """
    if any(count % 2 for count in pair.measure.flipped_bits.values()):
        return False
    sums = np.zeros(2, np.uint64)
    with np.errstate(over="ignore"):
        for part, _ in pair.differing():
            for seed in range(2):
                sums[seed] += _sum_mixed(pair.x[part], seed) - _sum_mixed(pair.y[part], seed)
    return not sums.any()


def _sum_mixed(bits: torch.Tensor, seed: int) -> np.uint64:
    """Return the sum of all elements, each mixed by splitmix64's finalizer, modulo 2**64."""
    z = bits.to(torch.int64).numpy().view(np.uint64) + np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    total: np.uint64 = np.add.reduce(z ^ (z >> np.uint64(31)))
    return total


def _moved_rows(pair: _Pair) -> list[int] | None:
    """Return the rows that differ if they are the reference's rows in another order, else None."""
    count = pair.actual.shape[0]
    x, y = pair.x.view(count, -1), pair.y.view(count, -1)
    step = max(1, _CHUNK // max(1, x.shape[1]))
    moved: list[int] = []
    for start in range(0, count, step):
        differs = torch.any(x[start : start + step] != y[start : start + step], dim=1)
        moved.extend(start + row for row in torch.nonzero(differs)[:, 0].tolist())
    actual_digests, expected_digests = (sorted(digest(tensor[row]).value for row in moved) for tensor in (x, y))
    return moved if actual_digests == expected_digests else None


def _rounded(pair: _Pair) -> Diagnosis | None:
    """Report that every element is the reference's, rounded to a narrower format."""
    if pair.e.dtype == torch.float32 and int(pair.x[0]) & _BELOW_TF32:
        return None  # no narrower format sets any of these bits
    candidates = [rounding for rounding in ROUNDINGS if rounding.is_narrower_than(pair.e.dtype)]
    for part in pair.chunks():
        expected, bits = pair.e[part], pair.x[part]
        candidates = [rounding for rounding in candidates if torch.equal(bit_patterns(rounding(expected)), bits)]
        if not candidates:
            return None
    first, *further = candidates
    evidence = {"rounding": first.how}
    # float16 has TF32's 10 mantissa bits: only values outside its exponent range distinguish the two
    other_words = [rounding.word for rounding in further if rounding.word != first.word]
    if other_words:
        evidence["also"] = other_words[0]
    return Diagnosis(word=first.word, evidence=evidence)


def _wrong_scale(pair: _Pair) -> Diagnosis | None:
    """Report that every element is the reference's, multiplied by one factor."""
    if not pair.a.dtype.is_floating_point:
        return None
    # a scaled copy is rounded once: each ratio is off by at most the unit roundoff, eps / 2, twice with a subnormal.
    # A ratio within that distance of 1 is noise in the last place, not a scale. With the few values of a one-byte
    # float that slack would accept many pairs, so there the ratio has to be exact
    slack = 2 * torch.finfo(pair.a.dtype).eps if pair.number_bytes > 1 else 0.0
    if pair.measure.max_rel <= slack / 2:  # no ratio, and so not their median, is further from 1
        return None
    ratio, count = None, 0
    for part in pair.chunks():
        x, y = pair.a[part].to(torch.float64), pair.e[part].to(torch.float64)
        if not bool(torch.isfinite(x).all()) or bool(torch.any((y == 0) & (x != 0))):
            return None
        ratios = x[y != 0] / y[y != 0]
        if not ratios.numel():
            continue
        count += ratios.numel()
        if ratio is None:  # the first chunk with ratios tells the one that all others must have
            ratio = float(torch.median(ratios[:_SAMPLE]))
            if not math.isfinite(ratio) or abs(ratio - 1) <= slack:
                return None
        if bool(((ratios - ratio).abs() > slack * abs(ratio)).any()):
            return None
    if ratio is None or count < 2:
        return None
    return Diagnosis(word=words.WRONG_SCALE, evidence={"ratio": ratio})
