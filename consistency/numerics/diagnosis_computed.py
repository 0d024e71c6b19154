"""Name what a computed tensor that is outside its bound looks like, with the evidence.

A device may round in another order, so bits tell nothing here: each rule asks what would bring the tensor back into its
bound. Rules are tried from the most to the least specific, over chunks; `unknown` is an honest answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from consistency.numerics.bound import Allowance, UserAllowance
from consistency.numerics.diagnosis_moved import FEW_ELEMENTS, PAGE_BYTES, Diagnosis, bit_field
from consistency.numerics.distance import Measure
from consistency.numerics.dtype import bit_patterns
from consistency.numerics.error import CHUNK
from consistency.numerics.rounding import ROUNDINGS
from consistency.numerics.words import Word

_BY_CHANCE = 1 / 32  # so seldom may an error of another kind be taken for flipped bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A stretch of a computed tensor beside its exact value, all flat and on the CPU.

    Attributes
    ----------
    start : int
        Flat index of the first element.
    actual : torch.Tensor
        `(n,)` of the tested dtype.
    exact, allowed : torch.Tensor
        `(n,)` float64: the exact value, and what the element may be off.
    base : torch.Tensor or None
        `(n,)` float64: what the computation added to; None where it added to nothing.
    """

    start: int
    actual: torch.Tensor
    exact: torch.Tensor
    allowed: torch.Tensor
    base: torch.Tensor | None = None

    def added(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what was computed, and what should have been, without what it was added to."""
        actual = self.actual.to(torch.float64)
        return (actual, self.exact) if self.base is None else (actual - self.base, self.exact - self.base)

    def outside(self) -> torch.Tensor:
        """Tell which elements are outside; NaN is."""
        difference = (self.actual.to(torch.float64) - self.exact).abs()
        return ~(difference <= self.allowed) & (self.actual.to(torch.float64) != self.exact)


Chunks = Callable[[], Iterable[Chunk]]


def low_rank_chunks(
    actual: torch.Tensor,
    *,
    left: torch.Tensor,
    right: torch.Tensor,
    scaling: float,
    base: torch.Tensor | None,
    allowance: Allowance | UserAllowance,
) -> Iterator[Chunk]:
    """Yield a delta or a merged weight beside its exact value; see `consistency.numerics.bound.measure_low_rank`."""
    rows, columns = actual.shape
    scaled, right64 = left.to(torch.float64) * scaling, right.to(torch.float64)
    step = max(1, CHUNK // max(1, columns))
    for row in range(0, rows, step):
        part = slice(row, row + step)
        exact = scaled[part] @ right64
        weight = None if base is None else base[part].to(torch.float64)
        size = scaled[part].abs() @ right64.abs()
        exact = exact if weight is None else exact + weight
        if isinstance(allowance, UserAllowance):
            allowed = torch.from_numpy(allowance.around(exact.numpy()))
        else:
            allowed = size * allowance.product + allowance.floor
            allowed = allowed if weight is None else allowed + weight.abs() * allowance.weight
        yield Chunk(
            start=row * columns,
            actual=actual[part].reshape(-1),
            exact=exact.reshape(-1),
            allowed=allowed.reshape(-1),
            base=None if weight is None else weight.reshape(-1),
        )


def exact_chunks(
    actual: torch.Tensor,
    exact: torch.Tensor,
    allowed: float | UserAllowance | torch.Tensor,
    *,
    base: torch.Tensor | None = None,
) -> Iterator[Chunk]:
    """Yield a tensor beside its float64 value: what all elements may be off alike, or each (float64, of its shape).

    `base` is what the computation added to, if to anything.
    """
    flat, reference = actual.detach().reshape(-1), exact.detach().reshape(-1)
    below = None if base is None else base.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        if isinstance(allowed, UserAllowance):
            limit = torch.from_numpy(allowed.around(reference[part].numpy()))
        elif isinstance(allowed, torch.Tensor):
            limit = allowed.reshape(-1)[part]
        else:
            limit = torch.full_like(reference[part], allowed)
        under = None if below is None else below[part].to(torch.float64)
        yield Chunk(start=start, actual=flat[part], exact=reference[part], allowed=limit, base=under)


def diagnose_computed(
    found: Measure, chunks: Chunks | None = None, *, in_tf32: Callable[[], Measure] | None = None
) -> Diagnosis:
    """Name the difference of a computed tensor from its exact value.

    Parameters
    ----------
    found : Measure
        Against the exact value.
    chunks : callable, optional
        Gives the tensor's chunks anew, each time it is called; without it no cause is looked for.
    in_tf32 : callable, optional
        Gives the measure by the bound that TF32 products would have, where they could have been used.
    """
    if found.bound_ratio is not None and found.bound_ratio <= 1:
        return Diagnosis(word=Word.ACCUMULATION_ORDER)
    seen = None if chunks is None else _look(chunks())
    if seen is not None and chunks is not None:
        rules: tuple[Callable[[], Diagnosis | None], ...] = (
            lambda: _zeros(seen),
            lambda: _bit_flip(seen),
            lambda: _non_finite(seen, alone=True),
            lambda: _rounded(seen),
            lambda: _wrong_scale(seen, chunks),
            lambda: _block(seen),
            lambda: _non_finite(seen, alone=False),
        )
        answers = (rule() for rule in rules)
        answer = next((answer for answer in answers if answer is not None), None)
        if answer is not None:
            return answer
    if not math.isfinite(found.max_abs):
        return Diagnosis(word=Word.NON_FINITE, evidence={"at": list(found.worst_index or ())})
    if in_tf32 is not None:
        ratio = in_tf32().bound_ratio
        if ratio is not None and ratio <= 1:
            return Diagnosis(word=Word.TF32_PRODUCTS, evidence={"tf32_bound_ratio": float(ratio)})
    return Diagnosis(word=Word.UNKNOWN)


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What one look over all chunks says of a tensor."""

    dtype: torch.dtype
    elements: int = 0
    outside: int = 0
    first: int = -1
    last: int = -1
    few: list[tuple[int, torch.Tensor, float, float]] = field(default_factory=list)
    all_zero: bool = True
    nonzero_expected: int = 0
    nan: int = 0
    inf: int = 0
    has_base: bool = False
    product: float = 0.0
    square: float = 0.0
    kept_by: list[int] = field(default_factory=list)


def _look(chunks: Iterable[Chunk]) -> _Seen | None:
    seen: _Seen | None = None
    for chunk in chunks:
        if seen is None:
            seen = _Seen(dtype=chunk.actual.dtype, has_base=chunk.base is not None)
            seen.kept_by = [i for i, r in enumerate(ROUNDINGS) if r.is_narrower_than(seen.dtype)]
        seen.elements += chunk.actual.numel()
        outside = torch.nonzero(chunk.outside()).reshape(-1)
        if outside.numel():
            seen.first = chunk.start + int(outside[0]) if seen.first < 0 else seen.first
            seen.last = chunk.start + int(outside[-1])
            seen.outside += outside.numel()
            broken = ~torch.isfinite(chunk.actual[outside]) & torch.isfinite(chunk.exact[outside])
            seen.nan += int(torch.isnan(chunk.actual[outside][broken]).sum())
            seen.inf += int(torch.isinf(chunk.actual[outside][broken]).sum())
            for i in outside[: FEW_ELEMENTS + 1 - len(seen.few)].tolist():
                place = chunk.actual[i : i + 1], float(chunk.exact[i]), float(chunk.allowed[i])
                seen.few.append((chunk.start + i, *place))
        added, wanted = chunk.added()
        seen.all_zero = seen.all_zero and not bool(torch.any(added != 0))
        seen.nonzero_expected += int(torch.count_nonzero(wanted.abs() > chunk.allowed))
        bits = bit_patterns(chunk.actual)
        seen.kept_by = [i for i in seen.kept_by if torch.equal(bit_patterns(ROUNDINGS[i](chunk.actual)), bits)]
        finite = torch.isfinite(added) & torch.isfinite(wanted)
        if not bool(finite.all()):
            added, wanted = added[finite], wanted[finite]
        seen.product += float(torch.dot(added, wanted))
        seen.square += float(torch.dot(wanted, wanted))
    return seen


def _zeros(seen: _Seen) -> Diagnosis | None:
    if not seen.all_zero or not seen.nonzero_expected:
        return None
    evidence: dict[str, Any] = {"nonzero_in_reference": seen.nonzero_expected}
    return Diagnosis(
        word=Word.ZEROS, evidence=evidence | ({"of": "what was added to the weight"} if seen.has_base else {})
    )


def _bit_flip(seen: _Seen) -> Diagnosis | None:
    """A few elements are outside, and one bit of each brings it back.

    An error of k times the bound that has nothing to do with bits is within one bound of a power of two, and the bit of
    that size has the value that flipping takes away, about once in k times. All may have no more of that than
    `_BY_CHANCE`.
    """
    if not 0 < seen.outside <= FEW_ELEMENTS:
        return None
    bits = []
    chance = 1.0
    for _, value, exact, allowed in seen.few:
        width = 8 * value.element_size()
        pattern = bit_patterns(value)
        back = [
            abs(float(torch.bitwise_xor(pattern, _one_bit(bit, pattern.dtype)).view(value.dtype)) - exact)
            for bit in range(width)
        ]
        best = min(range(width), key=lambda bit: math.inf if math.isnan(back[bit]) else back[bit])
        if not back[best] <= allowed:
            return None
        error = abs(float(value) - exact)
        chance *= min(1.0, allowed / error) if math.isfinite(error) else 0.0
        bits.append(best)
    if chance > _BY_CHANCE:
        return None
    fields = sorted({bit_field(seen.dtype, b) for b in bits})
    evidence = {"bits": sorted(set(bits)), "elements": seen.outside, "fields": fields}
    return Diagnosis(word=Word.BIT_FLIP, evidence=evidence)


def _one_bit(bit: int, dtype: torch.dtype) -> torch.Tensor:
    width = torch.iinfo(dtype).bits
    return torch.tensor(1 << bit if bit < width - 1 or dtype == torch.uint8 else -(1 << bit), dtype=dtype)


def _non_finite(seen: _Seen, *, alone: bool) -> Diagnosis | None:
    if not seen.nan + seen.inf or (alone and seen.nan + seen.inf < seen.outside):
        return None
    return Diagnosis(word=Word.NON_FINITE, evidence={"nan": seen.nan, "inf": seen.inf})


def _rounded(seen: _Seen) -> Diagnosis | None:
    """Every number is one of a narrower format: it went through it after it was computed."""
    if not seen.kept_by or seen.outside < 2 or seen.elements < FEW_ELEMENTS:
        return None
    return Diagnosis(word=ROUNDINGS[seen.kept_by[0]].word, evidence={"outside": seen.outside})


def _wrong_scale(seen: _Seen, chunks: Chunks) -> Diagnosis | None:
    """One factor on what was added brings every element back into its bound.

    A tenth of the bound is left for the factor, which is estimated (least squares); and it has to move some element by
    half of the bound at least, or it explains nothing.
    """
    if seen.nan + seen.inf or seen.square == 0 or seen.elements < 2:
        return None
    ratio = seen.product / seen.square
    if not math.isfinite(ratio) or ratio == 0:
        return None
    moves = False
    for chunk in chunks():
        added, wanted = chunk.added()
        if bool(torch.any((added - ratio * wanted).abs() > 1.1 * max(1.0, abs(ratio)) * chunk.allowed)):
            return None
        moves = moves or bool(torch.any((wanted * (ratio - 1)).abs() > 0.5 * chunk.allowed))
    if not moves:
        return None
    return Diagnosis(word=Word.WRONG_SCALE, evidence={"ratio": ratio})


def _block(seen: _Seen) -> Diagnosis | None:
    length = seen.last - seen.first + 1
    if length < 2 or length == seen.elements or seen.outside < 0.9 * length:
        return None
    size = torch.empty(0, dtype=seen.dtype).element_size()
    offset, stop = seen.first * size, (seen.last + 1) * size
    aligned = offset % PAGE_BYTES == 0 and (stop % PAGE_BYTES == 0 or stop == seen.elements * size)
    return Diagnosis(
        word=Word.BLOCK, evidence={"offset_bytes": offset, "length_bytes": stop - offset, "page_aligned": aligned}
    )
