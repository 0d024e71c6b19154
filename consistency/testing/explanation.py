"""Say what is wrong with a result that rounding does not explain: how much of it, where, and what would explain it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from consistency.numerics import words
from consistency.numerics.chunks import CHUNK, Chunk
from consistency.numerics.diagnosis import Diagnosis
from consistency.numerics.diagnosis_computed import diagnose_computed
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real

_MOST_NAMED = 5
"""Most rows whose numbers are listed."""

_ENOUGH = 8
"""Least wrong elements of a tensor that is compared with other tensors: fewer may fit by chance."""

_ROUNDED = {
    words.ROUNDED_TO_BF16: "bfloat16",
    words.ROUNDED_TO_FP16: "float16",
    words.ROUNDED_TO_TF32: "TF32",
}


_BEYOND = Measure(
    elements=1,
    mismatched=1,
    max_abs=Real(1),
    mean_abs=Real(1),
    rms=Real(1),
    max_rel=Real(1),
    max_ulp=None,
    ratio=None,
    worst_index=None,
    magnitude=Real(1),
)
"""A measure that says only that a result is not its exact one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongResult:
    """A result that is outside: its values, the exact ones, and the tolerance of each element, of one shape.

    `got` has the result's own dtype, `exact` and `allowed` are float64.
    """

    got: torch.Tensor
    exact: torch.Tensor
    allowed: torch.Tensor

    @property
    def wrong(self) -> torch.Tensor:
        """Return where an element is beyond its tolerance; NaN is."""
        return ~_is_within(self.got, self.exact, self.allowed)


def explain(result: WrongResult, others: Mapping[str, torch.Tensor]) -> str:
    """Return what is wrong in words: `1 of 1024 elements`, and what brings all within their tolerances, if known.

    Parameters
    ----------
    others : mapping of str to torch.Tensor
        Exact values of other results, which this one may have instead, by name.
    """
    if not result.got.numel():
        return ""
    cause = _cause(result, others)
    return f"{_extent(result.wrong)}: {cause}" if cause else _extent(result.wrong)


def _extent(wrong: torch.Tensor) -> str:
    """Return how many elements are wrong, and in which rows where these are few."""
    count, elements = int(wrong.sum()), wrong.numel()
    if not count:
        return "each element is within its own tolerance, and all together are not"
    text = f"{count} of {elements} elements"
    if wrong.dim() < 2 or count < 2:
        return text
    for dimension, title in ((wrong.dim() - 1, "columns"), (wrong.dim() - 2, "rows")):
        numbers = _numbers_along(wrong, dimension)
        if len(numbers) <= min(_MOST_NAMED, wrong.shape[dimension] // 2):
            listed = ", ".join(map(str, numbers))
            return f"{text}, all in {title} {listed} of {wrong.shape[dimension]}"
    rows = wrong.reshape(-1, wrong.shape[-1]).any(1)
    return f"{text}, in {int(rows.sum())} of {len(rows)} rows"


def _numbers_along(wrong: torch.Tensor, dimension: int) -> list[int]:
    """Return at which places along a dimension an element is wrong."""
    others = [other for other in range(wrong.dim()) if other != dimension]
    along = wrong.any(others) if others else wrong
    return [int(place) for place in along.nonzero().flatten()]


def _cause(result: WrongResult, others: Mapping[str, torch.Tensor]) -> str:
    """Return what explains the whole result; empty where nothing does."""
    by_word = _by_word(diagnose_computed(_BEYOND, lambda: _chunks(result)), result.got.element_size())
    if by_word or int(result.wrong.sum()) < _ENOUGH:
        return by_word
    for move in _moves(result.exact):
        # both values and tolerances are moved
        if _fits(result, move.apply(result.exact), move.apply(result.allowed), unknown=move.unknown):
            return f"it is the exact result {move.name}"
    for name, other in others.items():
        if _fits(result, other, result.allowed):
            return f"it is the exact {name}"
    return ""


def _by_word(diagnosis: Diagnosis, size: int) -> str:
    """Return a diagnosis in words; empty for one that says no more than the figures.

    Flipped bits are left out: one element of a kernel that is half as large again differs in one bit, too.

    Parameters
    ----------
    size : int
        Bytes of an element.
    """
    evidence = diagnosis.evidence
    if diagnosis.word == words.ZEROS:
        return "all are zero"
    if diagnosis.word == words.WRONG_SCALE:
        return f"got = {evidence['ratio']:.4g} × exact"
    if diagnosis.word in _ROUNDED:
        return f"all values are rounded to {_ROUNDED[diagnosis.word]}"
    if diagnosis.word == words.NON_FINITE and "nan" in evidence:
        return f"{evidence['nan']} NaN and {evidence['inf']} infinities where the exact values are finite"
    if diagnosis.word == words.BLOCK:
        start = evidence["offset_bytes"] // size
        return f"one range in memory, elements {start} to {start + evidence['length_bytes'] // size - 1}"
    return ""


def _chunks(result: WrongResult) -> Iterator[Chunk]:
    """Yield the result in pieces, as the diagnosis takes them."""
    got, exact, allowed = (tensor.reshape(-1) for tensor in (result.got, result.exact, result.allowed))
    for start in range(0, len(got), CHUNK):
        part = slice(start, start + CHUNK)
        yield Chunk(start=start, actual=got[part], exact=exact[part].numpy(), allowed=allowed[part].numpy())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A way to put the elements of a tensor elsewhere."""

    name: str
    apply: Callable[[torch.Tensor], torch.Tensor]
    unknown: int = 0
    """Elements of the result that may be anything."""


def _moves(exact: torch.Tensor) -> Iterator[_Move]:
    """Yield the ways to put the elements of a tensor elsewhere that are looked for."""
    if exact.dim() > 1 and exact.shape[-1] == exact.shape[-2]:
        yield _Move(name="transposed", apply=lambda tensor: tensor.mT)
    for dimension, size in enumerate(exact.shape):
        if size < 2:
            continue
        for steps in (1, -1):
            # what comes in at the edge is another thing in each kernel
            yield _Move(
                name=f"shifted by {steps} along dimension {dimension}",
                apply=functools.partial(torch.roll, shifts=steps, dims=dimension),
                unknown=exact.numel() // size,
            )
        yield _Move(name=f"reversed along dimension {dimension}", apply=functools.partial(torch.flip, dims=[dimension]))


def _fits(result: WrongResult, exact: torch.Tensor, allowed: torch.Tensor, *, unknown: int = 0) -> bool:
    """Report whether a result is other values than its exact ones, but for some elements that may be anything."""
    if exact.shape != result.got.shape:
        return False
    beyond = int((~_is_within(result.got, exact, allowed)).sum())
    # as many elements as may be anything are wrong in a row or two of a result that has not been moved at all
    return beyond <= unknown and beyond + _ENOUGH <= int(result.wrong.sum())


def _is_within(got: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return where elements are within their tolerances; equal infinities are."""
    wide = got.to(torch.float64)
    return ((wide - exact).abs() <= allowed) | (wide == exact)
