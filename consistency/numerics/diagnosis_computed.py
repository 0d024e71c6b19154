"""Diagnose a computed tensor that exceeds its tolerance.

Devices may round in a different order, so bits carry no information here: each rule asks what would bring the tensor
back within tolerance. Rules are tried from the most to the least specific, over chunks; `differs` is an honest answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from consistency.numerics import words
from consistency.numerics.chunks import Chunk, Chunks
from consistency.numerics.diagnosis import FEW_ELEMENTS, ROUNDINGS, Diagnosis, bit_flip, block, first_answer, non_finite
from consistency.numerics.dtype import bit_patterns
from consistency.numerics.kernels.numpy_distance import numbers_of
from consistency.numerics.measure import Measure

_BY_CHANCE = 1 / 32
"""Highest probability that an error of another kind is taken for flipped bits."""


def diagnose_computed(
    found: Measure, chunks: Chunks | None = None, *, in_tf32: Callable[[], Measure] | None = None
) -> Diagnosis:
    """Diagnose the difference of a computed tensor from its exact value.

    Parameters
    ----------
    found : Measure
        Against the exact value.
    chunks : callable, optional
        The tensor's chunks with the tolerance of each element; without them no cause is searched for.
    in_tf32 : callable, optional
        Return the measure by the bound of TF32 products, where the device could have used them.
    """
    if found.ratio is not None and found.ratio <= 1:
        return Diagnosis(word=words.ACCUMULATION_ORDER)
    answer = None if chunks is None else _diagnose(chunks)
    if answer is not None:
        return answer
    if not math.isfinite(found.max_abs):
        return Diagnosis(word=words.NON_FINITE, evidence={"at": list(found.worst_index or ())})
    if in_tf32 is not None:
        ratio = in_tf32().ratio
        if ratio is not None and ratio <= 1:
            return Diagnosis(word=words.TF32_PRODUCTS, evidence={"tf32_bound_ratio": float(ratio)})
    return Diagnosis(word=words.DIFFERS)


def _diagnose(chunks: Chunks) -> Diagnosis | None:
    with np.errstate(all="ignore"):  # NaN and infinities fail the comparisons below
        seen = _summarize(chunks())
        return first_answer(
            (
                lambda: _zeros(seen),
                lambda: _bit_flip(seen),
                lambda: non_finite(seen.nan, seen.inf) if seen.nan + seen.inf == seen.wrong else None,
                lambda: _rounded(seen),
                lambda: _wrong_scale(seen, chunks),
                lambda: _block(seen),
                lambda: non_finite(seen.nan, seen.inf),
            )
        )


@dataclass(slots=True, kw_only=True)
class _Summary:
    """What one pass over all chunks shows; `wrong` elements exceed their tolerance."""

    dtype: torch.dtype = torch.float32
    elements: int = 0
    wrong: int = 0
    first: int = -1
    last: int = -1
    few: list[tuple[torch.Tensor, float, float]] = field(default_factory=list)
    all_zero: bool = True
    nonzero_expected: int = 0
    nan: int = 0
    inf: int = 0
    has_base: bool = False
    product: float = 0.0
    square: float = 0.0
    roundings: list[int] = field(default_factory=list)


def _summarize(chunks: Iterable[Chunk]) -> _Summary:
    seen = _Summary()
    for chunk in chunks:
        if not seen.elements:
            seen.dtype, seen.has_base = chunk.actual.dtype, chunk.base is not None
            seen.roundings = [i for i, r in enumerate(ROUNDINGS) if r.is_narrower_than(seen.dtype)]
        seen.elements += len(chunk.exact)
        actual, allowed = numbers_of(chunk.actual), _allowed(chunk)
        wrong = np.flatnonzero(~(np.abs(actual - chunk.exact) <= allowed) & (actual != chunk.exact))  # NaN is wrong
        if len(wrong):
            seen.first = chunk.start + int(wrong[0]) if seen.first < 0 else seen.first
            seen.last = chunk.start + int(wrong[-1])
            seen.wrong += len(wrong)
            broken = actual[wrong][np.isfinite(chunk.exact[wrong])]
            seen.nan += int(np.count_nonzero(np.isnan(broken)))
            seen.inf += int(np.count_nonzero(np.isinf(broken)))
            for i in wrong[: FEW_ELEMENTS + 1 - len(seen.few)].tolist():
                seen.few.append((chunk.actual[i : i + 1], float(chunk.exact[i]), float(allowed[i])))
        added, expected = _added(chunk)
        seen.all_zero = seen.all_zero and not bool(np.any(added))
        seen.nonzero_expected += int(np.count_nonzero(np.abs(expected) > allowed))
        bits = bit_patterns(chunk.actual)
        seen.roundings = [i for i in seen.roundings if torch.equal(bit_patterns(ROUNDINGS[i](chunk.actual)), bits)]
        # by their tolerances: where large elements and small ones round, the small ones know a factor best
        known = np.isfinite(added) & np.isfinite(expected) & (allowed > 0)
        added, expected = added[known] / allowed[known], expected[known] / allowed[known]
        seen.product += float(np.einsum("i,i->", added, expected))
        seen.square += float(np.einsum("i,i->", expected, expected))
    return seen


def _allowed(chunk: Chunk) -> np.ndarray:
    assert chunk.allowed is not None
    return chunk.allowed


def _added(chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
    """Return the computed part and its exact value, without the tensor that it was added to."""
    actual = numbers_of(chunk.actual).astype(np.float64, copy=False)
    if chunk.base is None:
        return actual, chunk.exact
    base = chunk.base.to(torch.float64).numpy()
    return actual - base, chunk.exact - base


def _zeros(seen: _Summary) -> Diagnosis | None:
    if not seen.all_zero or not seen.nonzero_expected:
        return None
    return Diagnosis(word=words.ZEROS, evidence={"nonzero_in_reference": seen.nonzero_expected, **_of(seen)})


def _of(seen: _Summary) -> dict[str, str]:
    return {"of": "what was added to the weight"} if seen.has_base else {}


def _bit_flip(seen: _Summary) -> Diagnosis | None:
    """A few elements are wrong, and flipping one bit of each corrects it.

    An error of k tolerances that has nothing to do with bits is within one tolerance of a power of two, where the bit
    of that weight has the value that the flip removes, about once in k times. The product over all elements must not
    exceed `_BY_CHANCE`.
    """
    if not 0 < seen.wrong <= FEW_ELEMENTS:
        return None
    bits = []
    chance = 1.0
    for value, exact, allowed in seen.few:
        width = 8 * value.element_size()
        pattern = bit_patterns(value)
        one = torch.ones_like(pattern)
        back = [abs(float((pattern ^ (one << bit)).view(value.dtype)) - exact) for bit in range(width)]
        best = min(range(width), key=lambda bit: math.inf if math.isnan(back[bit]) else back[bit])
        if not back[best] <= allowed:
            return None
        error = abs(float(value) - exact)
        chance *= min(1.0, allowed / error) if math.isfinite(error) else 0.0
        bits.append(best)
    if chance > _BY_CHANCE:
        return None
    return bit_flip(seen.dtype, bits, {"elements": seen.wrong})


def _block(seen: _Summary) -> Diagnosis | None:
    """Return one range of wrong elements that leaves at least a tenth of the tensor right.

    An error of the whole tensor spares its small elements, and with them some at its ends.
    """
    if seen.last - seen.first + 1 > 0.9 * seen.elements:
        return None
    return block(seen.first, seen.last, wrong=seen.wrong, elements=seen.elements, size=seen.dtype.itemsize)


def _rounded(seen: _Summary) -> Diagnosis | None:
    """Every value is one of a narrower format: the result was rounded to it."""
    if not seen.roundings or seen.wrong < 2 or seen.elements < FEW_ELEMENTS:
        return None
    return Diagnosis(word=ROUNDINGS[seen.roundings[0]].word, evidence={"outside": seen.wrong})


def _wrong_scale(seen: _Summary, chunks: Chunks) -> Diagnosis | None:
    """One factor on what was added brings every element back within tolerance.

    A tenth of the tolerance is left for the factor, which is estimated by least squares in units of the tolerance. It
    has to move some element by at least half of its tolerance, or it explains nothing.
    """
    if seen.nan + seen.inf or seen.square == 0 or seen.elements < 2:
        return None
    ratio = seen.product / seen.square
    if not math.isfinite(ratio) or ratio == 0:
        return None
    moves = False
    for chunk in chunks():
        added, expected = _added(chunk)
        allowed = _allowed(chunk)
        if bool(np.any(np.abs(added - ratio * expected) > 1.1 * max(1.0, abs(ratio)) * allowed)):
            return None
        moves = moves or bool(np.any(np.abs(expected * (ratio - 1)) > 0.5 * allowed))
    return Diagnosis(word=words.WRONG_SCALE, evidence={"ratio": ratio, **_of(seen)}) if moves else None
