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

_SAMPLE = 1001  # if all ratios are equal, any few have the same median


def _nothing(_: torch.Tensor) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Other contents that a tensor may hold instead of its bytes."""

    poison: int | None = None
    """Bit pattern of the elements before the bytes were written."""
    initial: str | None = None
    """Digest of the tensor before anything was loaded into it."""
    swapped: Callable[[torch.Tensor], str | None] = _nothing
    stale: Callable[[torch.Tensor], str | None] = _nothing
    """`swapped`, `stale`: given the tensor, the name of something with the same bytes: the reference of another tensor
    of the run; or earlier contents of the memory, another adapter, or another run. None if there is none."""


def diagnose_structure(actual: torch.Tensor, expected: torch.Tensor) -> Diagnosis | None:
    """Compare shape and dtype, before any value."""
    if actual.shape != expected.shape:
        return Diagnosis(word=words.SHAPE, evidence={"got": list(actual.shape), "wanted": list(expected.shape)})
    if actual.dtype != expected.dtype:
        return Diagnosis(word=words.DTYPE, evidence={"got": str(actual.dtype), "wanted": str(expected.dtype)})
    return None


def diagnose_moved(
    actual: torch.Tensor, expected: torch.Tensor, found: Measure, *, known: Known | None = None
) -> Diagnosis:
    """Diagnose a tensor whose bytes were only moved.

    Parameters
    ----------
    actual, expected : torch.Tensor
        On the CPU, of equal shape and dtype. If their bits are equal there is nothing to diagnose: `differs`.
    found : Measure
        Of both.
    known : Known, optional
        Other contents that the tensor may hold.
    """
    if found.mismatched == 0:
        return Diagnosis(word=words.DIFFERS)
    known = known or Known()
    pair = _Pair(actual, expected, found)
    answer = first_answer(
        (
            lambda: _never_written(pair, known.poison),
            lambda: _zeros(pair),
            lambda: _fresh_init(pair, known.initial),
            lambda: _holds(pair, words.SWAPPED, known.swapped),
            lambda: _holds(pair, words.STALE, known.stale),
            lambda: _signed_zero(pair),
            lambda: _permuted(pair),
            lambda: _bit_flip(pair),
            lambda: _non_finite(pair, alone=True),
            lambda: _rounded(pair),
            lambda: _wrong_scale(pair),
            lambda: block(*pair.ends(), wrong=found.mismatched, elements=found.elements, size=pair.number_bytes),
            lambda: _non_finite(pair, alone=False),
        )
    )
    return answer or Diagnosis(word=words.DIFFERS)


class _Pair:
    """Two tensors as flat chunks: their values and their bits."""

    def __init__(self, actual: torch.Tensor, expected: torch.Tensor, found: Measure) -> None:
        self.actual, self.expected, self.found = actual, expected, found
        self.a, self.e = real_view(actual), real_view(expected)
        self.x, self.y = bit_patterns(self.a), bit_patterns(self.e)
        self.parts = 2 if actual.is_complex() else 1
        self.number_bytes = actual.element_size()

    def ends(self) -> tuple[int, int]:
        """Return the first and the last number that differ."""
        first, last = self.found.first_byte, self.found.last_byte
        assert first is not None
        assert last is not None
        return first // self.number_bytes, last // self.number_bytes

    def chunks(self) -> Iterator[slice]:
        return _slices(0, self.a.numel())

    def differing(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the chunks that differ, and which of their elements do."""
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
    if poison is None:
        return None
    if not all(bool(torch.all(pair.x[part][differs] == poison)) for part, differs in pair.differing()):
        return None
    evidence = {"elements": pair.found.mismatched, "of": pair.found.elements}
    if pair.found.mismatched < pair.found.elements:
        evidence |= byte_range(*pair.ends(), elements=pair.found.elements, size=pair.number_bytes)
    return Diagnosis(word=words.NEVER_WRITTEN, evidence=evidence)


def _zeros(pair: _Pair) -> Diagnosis | None:
    if any(bool(torch.any(pair.x[part] != 0)) for part in pair.chunks()):
        return None
    nonzero = sum(int(torch.count_nonzero(pair.y[part])) for part in pair.chunks())
    return Diagnosis(word=words.ZEROS, evidence={"nonzero_in_reference": nonzero})


def _fresh_init(pair: _Pair, initial: str | None) -> Diagnosis | None:
    if initial is None or digest(pair.actual).value != initial:
        return None
    return Diagnosis(word=words.FRESH_INIT, evidence={"holds": "its value before the file was loaded"})


def _holds(pair: _Pair, word: Word, find: Callable[[torch.Tensor], str | None]) -> Diagnosis | None:
    other = find(pair.actual)
    return None if other is None else Diagnosis(word=word, evidence={"holds": other})


def _signed_zero(pair: _Pair) -> Diagnosis | None:
    if not pair.a.dtype.is_floating_point or float(pair.found.max_abs) != 0:  # the distance between two zeros is 0
        return None
    for part, differs in pair.differing():
        if any(bool(torch.any(elements(side[part], differs) != 0)) for side in (pair.a, pair.e)):
            return None
    return Diagnosis(word=words.SIGNED_ZERO, evidence={"elements": pair.found.mismatched})


def _bit_flip(pair: _Pair) -> Diagnosis | None:
    found = pair.found
    if found.mismatched > FEW_ELEMENTS or sum(found.flipped_bits.values()) != found.mismatched:
        return None
    width = (1 << (8 * pair.a.element_size())) - 1
    for part, differs in pair.differing():
        flips = torch.bitwise_xor(pair.x[part][differs], pair.y[part][differs]).tolist()
        if any((flip & width).bit_count() != 1 for flip in flips):
            return None
    evidence = {"elements": found.mismatched, "index": list(found.worst_index or ())}
    return bit_flip(pair.a.dtype, found.flipped_bits, evidence)


def _non_finite(pair: _Pair, *, alone: bool) -> Diagnosis | None:
    """Find NaN or infinity where the reference is finite; `alone`: every difference is of that kind."""
    if not pair.a.dtype.is_floating_point or math.isfinite(pair.found.max_abs):
        return None
    nan = inf = 0
    for part, differs in pair.differing():
        actual, expected = (elements(side[part], differs).to(torch.float64) for side in (pair.a, pair.e))
        broken = ~torch.isfinite(actual) & torch.isfinite(expected)
        if alone and not bool(broken.all()):
            return None
        nan += int(torch.isnan(actual[broken]).sum())
        inf += int(torch.isinf(actual[broken]).sum())
    return non_finite(nan, inf)


def _permuted(pair: _Pair) -> Diagnosis | None:
    if not _same_multiset(pair):
        return None
    rows = _moved_rows(pair) if pair.actual.dim() > 1 else None
    evidence = {"of": "elements"} if rows is None else {"of": "rows", "rows": rows[:8], "count": len(rows)}
    return Diagnosis(word=words.PERMUTED, evidence=evidence)


def _same_multiset(pair: _Pair) -> bool:
    """Return whether both hold the same elements in some order, by sums that do not depend on the order.

    If so, each bit is set as often on both sides and flips an even number of times, which rules out most tensors. Then
    each element is mixed by splitmix64's finalizer (Steele et al., "Fast splittable pseudorandom number generators",
    2014) under two seeds: 128 bits, which do not collide by chance.
    """
    if any(count % 2 for count in pair.found.flipped_bits.values()):
        return False
    sums = np.zeros(2, np.uint64)
    with np.errstate(over="ignore"):
        for part, _ in pair.differing():
            for seed in range(2):
                sums[seed] += _mixed(pair.x[part], seed) - _mixed(pair.y[part], seed)
    return not sums.any()


def _mixed(bits: torch.Tensor, seed: int) -> np.uint64:
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
    moved = [
        start + row
        for start in range(0, count, step)
        for row in torch.nonzero(torch.any(x[start : start + step] != y[start : start + step], dim=1))[:, 0].tolist()
    ]
    got, wanted = (sorted(digest(side[row]).value for row in moved) for side in (x, y))
    return moved if got == wanted else None


def _rounded(pair: _Pair) -> Diagnosis | None:
    if pair.e.dtype == torch.float32 and int(pair.x[0]) & _BELOW_TF32:
        return None  # no narrower format sets any of these bits
    alive = [r for r in ROUNDINGS if r.is_narrower_than(pair.e.dtype)]
    for part in pair.chunks():
        alive = [r for r in alive if torch.equal(bit_patterns(r(pair.e[part])), pair.x[part])]
        if not alive:
            return None
    first, *others = alive
    # float16 has TF32's 10 mantissa bits: only values outside its exponent range distinguish the two
    also = [{"also": r.word} for r in others if r.word != first.word]
    return Diagnosis(word=first.word, evidence={"rounding": first.how, **(also[0] if also else {})})


def _wrong_scale(pair: _Pair) -> Diagnosis | None:
    if not pair.a.dtype.is_floating_point:
        return None
    # a scaled copy is rounded once: each ratio is off by at most the unit roundoff, eps / 2, twice with a subnormal.
    # A ratio within that distance of 1 is noise in the last place, not a scale. With the few values of a one-byte
    # float that slack would accept many pairs, so there the ratio has to be exact
    slack = 2 * torch.finfo(pair.a.dtype).eps if pair.number_bytes > 1 else 0.0
    if pair.found.max_rel <= slack / 2:  # no ratio, and so not their median, is further from 1
        return None
    ratio, used = None, 0
    for part in pair.chunks():
        x, y = pair.a[part].to(torch.float64), pair.e[part].to(torch.float64)
        if not bool(torch.isfinite(x).all()) or bool(torch.any((y == 0) & (x != 0))):
            return None
        ratios = x[y != 0] / y[y != 0]
        if not ratios.numel():
            continue
        used += ratios.numel()
        if ratio is None:
            ratio = float(torch.median(ratios[:_SAMPLE]))
            if not math.isfinite(ratio) or abs(ratio - 1) <= slack:
                return None
        if bool(((ratios - ratio).abs() > slack * abs(ratio)).any()):
            return None
    return None if ratio is None or used < 2 else Diagnosis(word=words.WRONG_SCALE, evidence={"ratio": ratio})
