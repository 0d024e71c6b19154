"""What explains a tensor that is not base + adapter: each mistake is computed and held against the tensor.

A least-squares fit of the difference by the delta says which mistakes are worth computing. One that is named holds for
every element, by the roundings of a writer (`orders.py`): nothing is concluded from a resemblance, but for a scaling
that has no name, which is said to be fitted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from consistency.capture.names import split_name
from consistency.capture.wording import and_more
from consistency.extras.merging.check_merged.adapter import LowRankTarget
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.names import FUSED, fused_in
from consistency.extras.merging.check_merged.orders import LowRankSum, MergeWriter, judge
from consistency.numerics.dtype import UNIT_ROUNDOFF

_SAMPLE = 512
"""Rows, and matrices of a stack, that a fit is made of."""

_LEAST_SIZE = 1e-3
"""Of the mean square, what an element counts as at least: below it the delta's own roundings decide."""

_FEW = 64
"""The same for a fit that only has to tell whether more is to be computed."""

_FEWER = 8
"""And for one that tells whether the delta is another layer's, of which there may be hundreds."""

_NEAR = 0.05
"""How near a fitted scaling has to be to one that is then computed: a fit of a half type's rounding is not exact."""

_FITS = 0.9
"""Share of the difference that a fit may leave over, root mean square, to be computed."""

_MOST_RUNS = 6

_MOST_APART = 0.1
"""Share of the elements that may be outside of a scaling that is only fitted, whose own error moves some of them."""

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Levels of bitsandbytes' nf4, as its source has them; its blocks have 64 values."""

Explanations = dict[MergeCause, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeQuestion:
    """A tensor that is not what it should be: `(stack, rows, columns)`, with the weight before and its target.

    `others` are the scalings of other modules of the adapter, `layers` those of them whose delta has this one's shape.
    `briefly`: look for a scaling alone, since of other tensors all else was in vain.
    """

    actual: torch.Tensor
    base: torch.Tensor
    target: LowRankTarget
    writer: MergeWriter
    others: Sequence[float] = ()
    layers: Sequence[LowRankTarget] = ()
    briefly: bool = False

    def sums(
        self, left: torch.Tensor, right: torch.Tensor, scaling: float
    ) -> Iterator[tuple[torch.Tensor, LowRankSum]]:
        """Yield each matrix of the stack with the sum of its base and this delta."""
        for one, weight, b, a in zip(self.actual, self.base, left, right, strict=True):
            yield one, LowRankSum(weight, b, a, scaling)

    def holds(self, left: torch.Tensor, right: torch.Tensor, scaling: float) -> bool:
        """Return whether the tensor is the base and this delta, in every element."""
        return not any(self.writer.judge(one, of).outside for one, of in self.sums(left, right, scaling))

    def fit(self, left: torch.Tensor, right: torch.Tensor, *, rows: int = _SAMPLE) -> tuple[float, float]:
        """Return the factor of a product that fits the difference best, and the share that it leaves over.

        Where a weight is large a small delta is rounded away, always to the same side: so each element weighs as much
        as it is sure, by one over the square of its size.
        """
        step = [max(1, size // rows) for size in left.shape[:2]]
        stack, some = slice(None, None, step[0]), slice(None, None, step[1])
        before = self.base[stack, some].double()
        size = (before.square() + _LEAST_SIZE * before.square().mean()).sqrt_().clamp_(min=1e-300)
        difference = (self.actual[stack, some].double() - before) / size
        delta = (left[stack, some].double() @ right[stack].double()) / size
        square = float(delta.square().sum())
        factor = float((difference * delta).sum()) / square if square else 0.0
        whole = float(difference.square().sum())
        left_over = float((difference - factor * delta).square().sum())
        return factor, math.sqrt(left_over / whole) if whole else 1.0


def explain(question: MergeQuestion) -> Explanations:
    """Return the mistakes that explain a tensor with a low-rank delta, each with what it is about.

    What is rearranged, or left out in part, is looked for where no scaling explains all of it.
    """
    target = question.target
    if question.holds(target.left, target.right, 0.0):
        return {MergeCause.NOT_MERGED: ""}
    found = dict(_scalings(question))
    if found or question.briefly:
        return found
    for cause, text, left, right in _rearranged(question):
        factor, rest = question.fit(left, right, rows=_FEW)
        near = rest < _FITS and _near(factor, target.scaling)
        if near and question.holds(left, right, target.scaling):
            found[cause] = text
    if not found and (layers := list(_other_layers(question))):
        found[MergeCause.OTHER_LAYER] = " or ".join(layers)
    if not found and target.left.shape[0] == 1:
        found |= _by_rows(question)
    if not found and target.left.shape[0] > 1:
        found |= _by_expert(question)
    if not found and _on_four_bits(question):
        found[MergeCause.FOUR_BIT_BASE] = ""
    return found


def _scalings(question: MergeQuestion) -> Iterator[tuple[MergeCause, str]]:
    target = question.target
    fitted, rest = question.fit(target.left, target.right)
    if not rest < _FITS:
        return
    named = {**target.scalings, **{f"that of another module ({one:g})": one for one in question.others}}
    if target.is_bias and _near(fitted, 1.0) and question.holds(target.left, target.right, 1.0):
        yield MergeCause.BIAS_UNSCALED, ""
        return
    matched = False
    if _near(fitted, 2 * target.scaling) and question.holds(target.left, target.right, 2 * target.scaling):
        yield MergeCause.TWICE, ""
        matched = True
    shares = {f"1/{n} of it, as a rank's share": target.scaling / n for n in (2, 4, 8)}
    names = [
        text
        for text, scaling in {**named, **shares, "its negative": -target.scaling}.items()
        if scaling != target.scaling and _near(fitted, scaling) and question.holds(target.left, target.right, scaling)
    ]
    if names:
        yield MergeCause.WRONG_SCALE, f"{' or '.join(names)} in the place of {target.scaling:g}"
    elif not matched and not _near(fitted, target.scaling):
        sums = question.sums(target.left, target.right, fitted)
        apart = [judge(one, of, question.writer.recent(one, of)).share for one, of in sums]
        if max(apart) < _MOST_APART:
            yield MergeCause.WRONG_SCALE, f"{fitted:.4g}, fitted, in the place of {target.scaling:g}"


def _near(fitted: float, scaling: float) -> bool:
    return abs(fitted - scaling) <= _NEAR * abs(scaling)


def _rearranged(question: MergeQuestion) -> Iterator[tuple[MergeCause, str, torch.Tensor, torch.Tensor]]:
    """Yield the factors as a mistake of layout has them."""
    target = question.target
    left, right = target.left, target.right
    stack, rows, columns = left.shape[0], left.shape[1], right.shape[2]
    if rows == columns:
        yield MergeCause.TRANSPOSED, "", right.transpose(1, 2), left.transpose(1, 2)
    for size, dim in ((rows, 1), (columns, 2)):
        if size % 2 or (stack == 1 and dim == 2):
            continue
        half, numbers = size // 2, torch.arange(size)
        for text, places in (
            ("its halves are swapped", numbers.roll(half)),
            ("it is laid out row by row (g0, u0, g1, u1, ...), and the delta half after half", numbers.view(2, half)),
            ("it is laid out half after half, and the delta row by row", numbers.view(half, 2)),
        ):
            moved = places.T.reshape(-1) if places.dim() > 1 else places
            of_rows = dim == 1
            yield (
                MergeCause.OTHER_PART,
                text,
                left[:, moved] if of_rows else left,
                right if of_rows else right[:, :, moved],
            )
    if len(target.flat) == 2 and stack > 1:
        yield from _other_packing(target, stack)


def _other_layers(question: MergeQuestion) -> Iterator[str]:
    """Yield the layers whose delta the tensor holds, with their scaling or its own."""
    for one in question.layers:
        factor, rest = question.fit(one.left, one.right, rows=_FEWER)
        scalings = {one.scaling, question.target.scaling} if rest < _FITS else ()
        if any(_near(factor, scaling) and question.holds(one.left, one.right, scaling) for scaling in scalings):
            yield split_name(one.name)[0]


def _other_packing(target: LowRankTarget, stack: int) -> Iterator[tuple[MergeCause, str, torch.Tensor, torch.Tensor]]:
    a, b = target.flat
    rank = a.shape[0] // stack
    inner = {"": a.view(stack, rank, -1), "lora_A": a.view(rank, stack, -1).transpose(0, 1)}
    outer = {"": b.view(-1, rank, stack).permute(2, 0, 1), "lora_B": b.view(-1, stack, rank).permute(1, 0, 2)}
    for of_b, left in outer.items():
        for of_a, right in inner.items():
            names = " and ".join(filter(None, (of_a, of_b)))
            if not names:
                continue
            text = f"{names} with the expert as the {'slower' if of_b else 'faster'} index"
            if left.shape == target.left.shape and right.shape == target.right.shape:
                yield MergeCause.EXPERT_ORDER, text, left, right
            if right.transpose(1, 2).shape == target.left.shape and left.transpose(1, 2).shape == target.right.shape:
                yield MergeCause.EXPERT_ORDER, text, right.transpose(1, 2), left.transpose(1, 2)


def _by_rows(question: MergeQuestion) -> Explanations:
    """Explain a matrix of which some rows are right, and others hold the base or the delta of other rows."""
    target, actual, base = question.target, question.actual[0], question.base[0]
    left, right = target.left[0], target.right[0]
    whole = LowRankSum(base, left, right, target.scaling)
    order = question.writer.recent(actual, whole)
    quarter = max(1, len(base) // 4)
    for start in range(0, len(base), quarter):
        rows = slice(start, start + quarter)
        found = question.writer.judge(actual[rows], LowRankSum(base[rows], left[rows], right, target.scaling))
        if not found.outside:
            order = found.order
            break
    best = judge(actual, whole, order, patient=True)
    alone = judge(actual, replace(whole, scaling=0.0), order, patient=True)
    states = torch.where(best.rows == 0, 0, torch.where(alone.rows == 0, 1, 2))
    runs = _runs(states)
    if not 1 < len(runs) <= _MOST_RUNS:
        return {}
    names = _parts_of(target.name, base.shape[0])
    if all(state in (0, 1) for _, _, state in runs):
        return {MergeCause.PART_LEFT_OUT: _described(runs, names, {0: "base + adapter", 1: "the base"})}
    texts = {0: "base + adapter", 1: "the base"}
    for start, stop, state in runs:
        if state != 2:
            continue
        size = stop - start
        for other in range(0, len(left) - size + 1, size):
            of = LowRankSum(base[start:stop], left[other : other + size], right, target.scaling)
            if other != start and not question.writer.judge(actual[start:stop], of).outside:
                texts[2] = f"the delta of rows {other}-{other + size - 1}"
                break
        else:
            return {}
    return {MergeCause.OTHER_PART: _described(runs, names, texts)}


def _by_expert(question: MergeQuestion) -> Explanations:
    """Explain a stack of matrices of which some are right, and others hold the base alone."""
    target, states = question.target, []
    for one, of in question.sums(target.left, target.right, target.scaling):
        right = not question.writer.judge(one, of).outside
        states.append(0 if right else 1 if not question.writer.judge(one, replace(of, scaling=0.0)).outside else 2)
    if 2 in states or len(set(states)) < 2:
        return {}
    runs = _runs(torch.tensor(states))
    texts = {0: "base + adapter", 1: "the base"}
    return {MergeCause.EXPERTS_LEFT_OUT: _described(runs, {}, texts, what="expert")}


def _runs(states: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return the stretches of equal states: start, stop and state."""
    edges = [0, *((states[1:] != states[:-1]).nonzero().reshape(-1) + 1).tolist(), len(states)]
    return [(start, stop, int(states[start])) for start, stop in itertools.pairwise(edges)]


def _parts_of(name: str, rows: int) -> dict[tuple[int, int], str]:
    """Return the names of the equal parts of a fused weight by their rows."""
    fused = FUSED.get(fused_in(name), ())
    if not fused or rows % len(fused):
        return {}
    size = rows // len(fused)
    return {(n * size, (n + 1) * size): part for n, part in enumerate(fused)}


def _described(
    runs: list[tuple[int, int, int]], names: dict[tuple[int, int], str], texts: dict[int, str], *, what: str = "row"
) -> str:
    parts = []
    for start, stop, state in runs[:_MOST_RUNS]:
        places = f"{what} {start}" if stop - start == 1 else f"{what}s {start}-{stop - 1}"
        name = f" ({names[start, stop]})" if (start, stop) in names else ""
        parts.append(f"{places}{name} hold{'s' if stop - start == 1 else ''} {texts[state]}")
    parts += filter(None, [and_more(len(runs) - _MOST_RUNS, "run")])
    left_out = [names[start, stop] for start, stop, state in runs if state == 1 and (start, stop) in names]
    return ", ".join(parts) + (f": the delta of {' and '.join(left_out)} was left out" if left_out else "")


def _on_four_bits(question: MergeQuestion) -> bool:
    """Return whether the base was rounded to nf4 before the merge: one scale per block of 64 explains all of them."""
    target, table = question.target, torch.tensor(_NF4, dtype=torch.float64)
    middles = (table[1:] + table[:-1]) / 2
    u = UNIT_ROUNDOFF.get(question.actual.dtype, 0.0)
    if question.base[0].numel() % 64:
        return False
    rows = slice(0, -(-64 * _SAMPLE // question.base.shape[2]) * 64)  # whole blocks
    for one, of in question.sums(target.left, target.right, target.scaling):
        values, delta = of.base[rows].double(), of.delta(rows)
        blocks = values.reshape(-1, 64)
        levels = table[torch.bucketize(blocks / blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-300), middles)]
        before = (one[rows].double() - delta).reshape(-1, 64)
        scale = (before * levels).sum(dim=1, keepdim=True) / levels.square().sum(dim=1, keepdim=True).clamp(min=1e-300)
        size = (one[rows].double().abs() + delta.abs()).reshape(-1, 64) + (levels * scale).abs()
        if not bool(((before - levels * scale).abs() <= 3 * u * size.amax(dim=1, keepdim=True)).all()):
            return False
    return bool(question.actual.numel())
