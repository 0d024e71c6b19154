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
    measure: Measure, chunks: Chunks | None = None, *, in_tf32: Callable[[], Measure] | None = None
) -> Diagnosis:
    """Diagnose the difference of a computed tensor from its exact value.

    Parameters
    ----------
    measure : Measure
        How far the tensor is from the exact value.
    chunks : callable, optional
        Returns the tensor's chunks with the tolerance of each element; without them no cause is searched for.
    in_tf32 : callable, optional
        Returns the measure by the bound of TF32 products, where the device could have used them.
    """
    if measure.ratio is not None and measure.ratio <= 1:
        return Diagnosis(word=words.ACCUMULATION_ORDER)
    answer = None if chunks is None else _diagnose(chunks)
    if answer is not None:
        return answer
    if not math.isfinite(measure.max_abs):
        return Diagnosis(word=words.NON_FINITE, evidence={"at": list(measure.worst_index or ())})
    if in_tf32 is not None:
        ratio = in_tf32().ratio
        if ratio is not None and ratio <= 1:
            return Diagnosis(word=words.TF32_PRODUCTS, evidence={"tf32_bound_ratio": float(ratio)})
    return Diagnosis(word=words.DIFFERS)


def _diagnose(chunks: Chunks) -> Diagnosis | None:
    """Search for a cause; None where no rule has an answer."""
    with np.errstate(all="ignore"):  # NaN and infinities fail the comparisons below
        summary = _summarize(chunks())
        # NaN and infinity come twice: before the rules on values where nothing else is wrong, and after them
        return first_answer(
            (
                lambda: _zeros(summary),
                lambda: _bit_flip(summary),
                lambda: _nothing_but_non_finite(summary),
                lambda: _rounded(summary),
                lambda: _wrong_scale(summary, chunks),
                lambda: _block(summary),
                lambda: non_finite(summary.nan, summary.inf),
            )
        )


@dataclass(slots=True, kw_only=True)
class _Summary:
    """The counts and sums of one pass over all chunks; `wrong` elements exceed their tolerance."""

    dtype: torch.dtype = torch.float32
    elements: int = 0
    wrong: int = 0
    first: int = -1
    last: int = -1
    """`first`, `last`: numbers of the first and the last wrong element, -1 where there is none."""
    first_wrong: list[tuple[torch.Tensor, float, float]] = field(default_factory=list)
    """The first wrong elements, at most one more than `FEW_ELEMENTS`: tensor of one element, exact value, tolerance."""
    all_zero: bool = True
    """Whether everything that was computed is zero."""
    nonzero_expected: int = 0
    """Elements whose exact value is further from zero than their tolerance."""
    nan: int = 0
    inf: int = 0
    """`nan`, `inf`: number of NaN and infinities where the exact value is finite."""
    has_base: bool = False
    """Whether the computed values were added to a base."""
    product: float = 0.0
    square: float = 0.0
    """`product`, `square`: sums over all elements, in units of the tolerance, of computed times exact value and of the
    square of the exact value."""
    roundings: list[int] = field(default_factory=list)
    """Numbers of the `ROUNDINGS` that leave every element as it is."""

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk."""
        if not self.elements:
            self.dtype, self.has_base = chunk.actual.dtype, chunk.base is not None
            self.roundings = [i for i, rounding in enumerate(ROUNDINGS) if rounding.is_narrower_than(self.dtype)]
        self.elements += len(chunk.exact)
        allowed = _allowed(chunk)
        self._add_wrong_elements(chunk, allowed)
        # zeros and scales are looked for in what was computed: the base hides them
        added, expected = _without_base(chunk)
        self.all_zero = self.all_zero and not bool(np.any(added))
        self.nonzero_expected += int(np.count_nonzero(np.abs(expected) > allowed))
        bits = bit_patterns(chunk.actual)
        self.roundings = [i for i in self.roundings if torch.equal(bit_patterns(ROUNDINGS[i](chunk.actual)), bits)]
        # by their tolerances: where large elements and small ones round, the small ones know a factor best
        usable = np.isfinite(added) & np.isfinite(expected) & (allowed > 0)
        added, expected = added[usable] / allowed[usable], expected[usable] / allowed[usable]
        self.product += float(np.einsum("i,i->", added, expected))
        self.square += float(np.einsum("i,i->", expected, expected))

    def _add_wrong_elements(self, chunk: Chunk, allowed: np.ndarray) -> None:
        """Count the elements of a chunk that exceed their tolerance, and keep the first ones."""
        actual = numbers_of(chunk.actual)
        wrong = np.flatnonzero(~(np.abs(actual - chunk.exact) <= allowed) & (actual != chunk.exact))  # NaN is wrong
        if not len(wrong):
            return
        if self.first < 0:
            self.first = chunk.start + int(wrong[0])
        self.last = chunk.start + int(wrong[-1])
        self.wrong += len(wrong)
        broken = actual[wrong][np.isfinite(chunk.exact[wrong])]
        self.nan += int(np.count_nonzero(np.isnan(broken)))
        self.inf += int(np.count_nonzero(np.isinf(broken)))
        for i in wrong[: FEW_ELEMENTS + 1 - len(self.first_wrong)].tolist():
            self.first_wrong.append((chunk.actual[i : i + 1], float(chunk.exact[i]), float(allowed[i])))


def _summarize(chunks: Iterable[Chunk]) -> _Summary:
    summary = _Summary()
    for chunk in chunks:
        summary.add(chunk)
    return summary


def _allowed(chunk: Chunk) -> np.ndarray:
    """Return the tolerance of each element, which chunks for a diagnosis always have."""
    assert chunk.allowed is not None
    return chunk.allowed


def _without_base(chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
    """Return the computed values and their exact ones, both without the base that they were added to: float64."""
    actual = numbers_of(chunk.actual).astype(np.float64, copy=False)
    if chunk.base is None:
        return actual, chunk.exact
    base = chunk.base.to(torch.float64).numpy()
    return actual - base, chunk.exact - base


def _zeros(summary: _Summary) -> Diagnosis | None:
    """Report that everything computed is zero and should not be."""
    if not summary.all_zero or not summary.nonzero_expected:
        return None
    evidence = {"nonzero_in_reference": summary.nonzero_expected, **_named_part(summary)}
    return Diagnosis(word=words.ZEROS, evidence=evidence)


def _nothing_but_non_finite(summary: _Summary) -> Diagnosis | None:
    """Report NaN and infinity where all wrong elements are of that kind."""
    if summary.nan + summary.inf != summary.wrong:
        return None
    return non_finite(summary.nan, summary.inf)


def _named_part(summary: _Summary) -> dict[str, str]:
    """Return the evidence that names the judged part of a sum; empty where there is no base."""
    return {"of": "what was added to the weight"} if summary.has_base else {}


def _bit_flip(summary: _Summary) -> Diagnosis | None:
    """Report flipped bits where a few elements are wrong, and flipping one bit of each corrects it.

    An error of k tolerances that has nothing to do with bits is within one tolerance of a power of two, where the bit
    of that weight has the value that the flip removes, about once in k times. The product over all elements must not
    exceed `_BY_CHANCE`.
    """
    if not 0 < summary.wrong <= FEW_ELEMENTS:
        return None
    bits = []
    chance = 1.0
    for value, exact, allowed in summary.first_wrong:
        width = 8 * value.element_size()
        pattern = bit_patterns(value)
        lowest_bit = torch.ones_like(pattern)
        flipped = [float((pattern ^ (lowest_bit << bit)).view(value.dtype)) for bit in range(width)]
        errors = [abs(number - exact) for number in flipped]
        best_bit = min(range(width), key=lambda bit: _nan_as_infinity(errors[bit]))
        if not errors[best_bit] <= allowed:
            return None
        error = abs(float(value) - exact)
        # a flip that corrects an error that is not finite is no chance
        chance *= min(1.0, allowed / error) if math.isfinite(error) else 0.0
        bits.append(best_bit)
    if chance > _BY_CHANCE:
        return None
    return bit_flip(summary.dtype, bits, {"elements": summary.wrong})


def _nan_as_infinity(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _block(summary: _Summary) -> Diagnosis | None:
    """Report one range of wrong elements that leaves at least a tenth of the tensor right.

    An error of the whole tensor spares its small elements, and with them some at its ends.
    """
    if summary.last - summary.first + 1 > 0.9 * summary.elements:
        return None
    return block(
        summary.first, summary.last, wrong=summary.wrong, elements=summary.elements, size=summary.dtype.itemsize
    )


def _rounded(summary: _Summary) -> Diagnosis | None:
    """Report that the result was rounded to a narrower format: every value is one of it."""
    if not summary.roundings or summary.wrong < 2 or summary.elements < FEW_ELEMENTS:
        return None
    return Diagnosis(word=ROUNDINGS[summary.roundings[0]].word, evidence={"outside": summary.wrong})


def _wrong_scale(summary: _Summary, chunks: Chunks) -> Diagnosis | None:
    """Report a wrong scale where one factor on the computed values brings every element back within tolerance.

    A tenth of the tolerance is left for the factor, which is estimated by least squares in units of the tolerance. It
    has to move some element by at least half of its tolerance, or it explains nothing.
    """
    if summary.nan + summary.inf or summary.square == 0 or summary.elements < 2:
        return None
    ratio = summary.product / summary.square
    if not math.isfinite(ratio) or ratio == 0:
        return None
    moves = False  # whether the factor matters for any element
    for chunk in chunks():
        added, expected = _without_base(chunk)
        allowed = _allowed(chunk)
        # a device that computes the wrong multiple may be off by that multiple of the tolerance
        if bool(np.any(np.abs(added - ratio * expected) > 1.1 * max(1.0, abs(ratio)) * allowed)):
            return None
        moves = moves or bool(np.any(np.abs(expected * (ratio - 1)) > 0.5 * allowed))
    if not moves:
        return None
    return Diagnosis(word=words.WRONG_SCALE, evidence={"ratio": ratio, **_named_part(summary)})
