"""Explain a tensor that is not base + adapter: each mistake is computed and compared with the tensor.

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
from consistency.extras.merging.check_merged.orders import LowRankSum, MergeWriter, Order, judge
from consistency.numerics.dtype import UNIT_ROUNDOFF

_SAMPLE = 512
"""Rows, and matrices of a stack, that a fit is made of."""

_LEAST_SIZE = 1e-3
"""Least square size of an element in a fit, relative to the mean square: below, the delta's own roundings decide."""

_FEW = 64
"""Rows, and matrices of a stack, of a fit that only has to tell whether more is to be computed."""

_FEWER = 8
"""Rows, and matrices, of a fit that tells whether the delta is another layer's, of which there may be hundreds."""

_NEAR = 0.05
"""Relative distance of a fitted scaling from one that is then computed: a fit to rounded values is not exact."""

_FITS = 0.9
"""Part of the difference, root mean square, that a fit may leave over for its mistake to be computed."""

_MOST_RUNS = 6
"""Stretches of rows, or of experts, in an explanation."""

_MOST_APART = 0.1
"""Part of the elements that may be outside of a scaling that is only fitted, whose own error moves some of them."""

_RIGHT, _BASE_ALONE, _ELSE = 0, 1, 2
"""States of a row or an expert: it holds base + adapter, the base alone, or something else."""

_STATE_TEXTS = {_RIGHT: "base + adapter", _BASE_ALONE: "the base"}

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Levels of bitsandbytes' nf4, as its source has them; its blocks have 64 values."""

Explanations = dict[MergeCause, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeQuestion:
    """A tensor that is not base + adapter, and what is known of it.

    Attributes
    ----------
    actual, base : torch.Tensor
        The folder's tensor and the base's, `(stack, rows, columns)`.
    target : LowRankTarget
        The low-rank delta that should have been added.
    writer : MergeWriter
        Finds the roundings of the folder's writer.
    others : sequence of float
        Scalings of other modules of the adapter.
    layers : sequence of LowRankTarget
        Other modules whose delta has this one's shape.
    briefly : bool
        Look for a scaling alone, since all else was in vain for other tensors.
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
        for matrix, weight, b, a in zip(self.actual, self.base, left, right, strict=True):
            yield matrix, LowRankSum(weight, b, a, scaling)

    def holds(self, left: torch.Tensor, right: torch.Tensor, scaling: float) -> bool:
        """Return whether the tensor is the base and this delta, in every element."""
        sums = self.sums(left, right, scaling)
        return not any(self.writer.judge(matrix, low_rank_sum).outside for matrix, low_rank_sum in sums)

    def is_merged_twice(self) -> bool:
        """Return whether the tensor is the base with the delta added twice, and rounded after each time."""
        target = self.target
        sums = self.sums(target.left, target.right, target.scaling)
        return not any(self.writer.judge(matrix, low_rank_sum, is_twice=True).outside for matrix, low_rank_sum in sums)

    def fit(self, left: torch.Tensor, right: torch.Tensor, *, rows: int = _SAMPLE) -> tuple[float, float]:
        """Return the factor of a product that fits the difference best, and the part that it leaves over.

        Where a weight is large a small delta is rounded away, always to the same side: so each element weighs as much
        as it is sure, by one over the square of its size.
        """
        stack_step, row_step = (max(1, size // rows) for size in left.shape[:2])
        stack, sampled_rows = slice(None, None, stack_step), slice(None, None, row_step)
        before = self.base[stack, sampled_rows].double()
        size = (before.square() + _LEAST_SIZE * before.square().mean()).sqrt_().clamp_(min=1e-300)
        difference = (self.actual[stack, sampled_rows].double() - before) / size
        delta = (left[stack, sampled_rows].double() @ right[stack].double()) / size
        square = float(delta.square().sum())
        factor = float((difference * delta).sum()) / square if square else 0.0
        whole = float(difference.square().sum())
        left_over = float((difference - factor * delta).square().sum())
        return factor, math.sqrt(left_over / whole) if whole else 1.0


def explain(question: MergeQuestion) -> Explanations:
    """Return the mistakes that explain a tensor with a low-rank delta, each with a text about it.

    Another layout, or a part that is left out, is looked for where no scaling explains the whole tensor.
    """
    target = question.target
    if question.holds(target.left, target.right, 0.0):
        return {MergeCause.NOT_MERGED: ""}
    explanations = dict(_scalings(question))
    if explanations or question.briefly:
        return explanations
    for cause, text, left, right in _rearranged(question):
        factor, left_over = question.fit(left, right, rows=_FEW)
        is_likely = left_over < _FITS and _is_near(factor, target.scaling)
        if is_likely and question.holds(left, right, target.scaling):
            explanations[cause] = text
    if explanations:
        return explanations
    if layers := list(_other_layers(question)):
        return {MergeCause.OTHER_LAYER: " or ".join(layers)}
    explanations = _by_rows(question) if target.left.shape[0] == 1 else _by_expert(question)
    if not explanations and _is_on_four_bits(question):
        explanations = {MergeCause.FOUR_BIT_BASE: ""}
    return explanations


def _scalings(question: MergeQuestion) -> Iterator[tuple[MergeCause, str]]:
    """Yield the mistakes of the scaling: those with a name, or else the scaling that fits."""
    target = question.target
    fitted, left_over = question.fit(target.left, target.right)
    if not left_over < _FITS:
        return
    if target.is_bias and _is_near(fitted, 1.0) and question.holds(target.left, target.right, 1.0):
        yield MergeCause.BIAS_UNSCALED, ""
        return
    is_twice = _is_near(fitted, 2 * target.scaling) and (
        question.is_merged_twice() or question.holds(target.left, target.right, 2 * target.scaling)
    )
    if is_twice:
        yield MergeCause.TWICE, ""
    names = []
    for text, scaling in _named_scalings(question).items():
        is_likely = scaling != target.scaling and _is_near(fitted, scaling)
        if is_likely and question.holds(target.left, target.right, scaling):
            names.append(text)
    if names:
        yield MergeCause.WRONG_SCALE, f"{' or '.join(names)} instead of {target.scaling:g}"
    elif not is_twice and not _is_near(fitted, target.scaling):
        # A fitted scaling is not exact, so it may leave some elements outside.
        outside = []
        for matrix, low_rank_sum in question.sums(target.left, target.right, fitted):
            order = question.writer.recent(matrix, low_rank_sum)
            outside.append(judge(matrix, low_rank_sum, order).share)
        if max(outside) < _MOST_APART:
            yield MergeCause.WRONG_SCALE, f"{fitted:.4g}, fitted, instead of {target.scaling:g}"


def _named_scalings(question: MergeQuestion) -> dict[str, float]:
    """Return the scalings that a merge may take by mistake, in words."""
    target = question.target
    scalings = dict(target.scalings)
    scalings |= {f"that of another module ({other:g})": other for other in question.others}
    scalings |= {f"1/{n} of it, as a rank's share": target.scaling / n for n in (2, 4, 8)}
    scalings["its negative"] = -target.scaling
    return scalings


def _is_near(fitted: float, scaling: float) -> bool:
    return abs(fitted - scaling) <= _NEAR * abs(scaling)


def _rearranged(question: MergeQuestion) -> Iterator[tuple[MergeCause, str, torch.Tensor, torch.Tensor]]:
    """Yield mistakes of layout: the cause, a text, and the factors of the delta in that layout."""
    target = question.target
    left, right = target.left, target.right
    stack, rows, columns = left.shape[0], left.shape[1], right.shape[2]
    if rows == columns:
        yield MergeCause.TRANSPOSED, "", right.transpose(1, 2), left.transpose(1, 2)
    if rows % 2 == 0:
        for text, order in _orders_of_halves(rows):
            yield MergeCause.OTHER_PART, text, left[:, order], right
    if columns % 2 == 0 and stack > 1:
        for text, order in _orders_of_halves(columns):
            yield MergeCause.OTHER_PART, text, left, right[:, :, order]
    if len(target.flat) == 2 and stack > 1:
        yield from _other_packing(target, stack)


def _orders_of_halves(size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the orders in which a merge may take the two halves of a fused weight, in words and as indices."""
    half, indices = size // 2, torch.arange(size)
    yield "its halves are swapped", indices.roll(half)
    row_by_row = "it is laid out row by row (g0, u0, g1, u1, ...), and the delta half after half"
    yield row_by_row, indices.view(2, half).T.reshape(-1)
    yield "it is laid out half after half, and the delta row by row", indices.view(half, 2).T.reshape(-1)


def _other_layers(question: MergeQuestion) -> Iterator[str]:
    """Yield the layers whose delta the tensor holds, with their scaling or its own."""
    for other in question.layers:
        factor, left_over = question.fit(other.left, other.right, rows=_FEWER)
        if not left_over < _FITS:
            continue
        for scaling in {other.scaling, question.target.scaling}:
            if _is_near(factor, scaling) and question.holds(other.left, other.right, scaling):
                yield split_name(other.name)[0]
                break


def _other_packing(target: LowRankTarget, stack: int) -> Iterator[tuple[MergeCause, str, torch.Tensor, torch.Tensor]]:
    """Yield the factors of experts as a merge has them that takes the expert for the other index of A or B."""
    a, b = target.flat
    rank = a.shape[0] // stack
    # by the name of the factor that is taken otherwise than by PEFT; empty where it is taken as by PEFT
    rights = {"": a.view(stack, rank, -1), "lora_A": a.view(rank, stack, -1).transpose(0, 1)}
    lefts = {"": b.view(-1, rank, stack).permute(2, 0, 1), "lora_B": b.view(-1, stack, rank).permute(1, 0, 2)}
    for other_b, left in lefts.items():
        for other_a, right in rights.items():
            names = " and ".join(name for name in (other_a, other_b) if name)
            if not names:
                continue
            index = "slower" if other_b else "faster"
            text = f"{names} with the expert as the {index} index"
            if left.shape == target.left.shape and right.shape == target.right.shape:
                yield MergeCause.EXPERT_ORDER, text, left, right
            if right.transpose(1, 2).shape == target.left.shape and left.transpose(1, 2).shape == target.right.shape:
                yield MergeCause.EXPERT_ORDER, text, right.transpose(1, 2), left.transpose(1, 2)


def _by_rows(question: MergeQuestion) -> Explanations:
    """Explain a matrix of which some rows are right, and others hold the base or the delta of other rows."""
    target, actual, base = question.target, question.actual[0], question.base[0]
    left, right = target.left[0], target.right[0]
    whole = LowRankSum(base, left, right, target.scaling)
    order = _order_of_a_right_quarter(question, whole)
    with_delta = judge(actual, whole, order, patient=True)
    without_delta = judge(actual, replace(whole, scaling=0.0), order, patient=True)
    not_right = torch.where(without_delta.rows == 0, _BASE_ALONE, _ELSE)
    runs = _runs(torch.where(with_delta.rows == 0, _RIGHT, not_right))
    if not 1 < len(runs) <= _MOST_RUNS:
        return {}
    names = _parts_of(target.name, base.shape[0])
    if all(state != _ELSE for _, _, state in runs):
        return {MergeCause.PART_LEFT_OUT: _described(runs, names, _STATE_TEXTS)}
    texts = dict(_STATE_TEXTS)
    for start, stop, state in runs:
        if state == _ELSE:
            other = _rows_of_delta(question, start, stop)
            if other is None:
                return {}
            texts[_ELSE] = f"the delta of rows {other}-{other + stop - start - 1}"
    return {MergeCause.OTHER_PART: _described(runs, names, texts)}


def _order_of_a_right_quarter(question: MergeQuestion, whole: LowRankSum) -> Order:
    """Return the writer's order by the first quarter of the rows that is right; the most recent one without such."""
    actual, base = question.actual[0], question.base[0]
    quarter = max(1, len(base) // 4)
    for start in range(0, len(base), quarter):
        rows = slice(start, start + quarter)
        part = LowRankSum(base[rows], whole.left[rows], whole.right, whole.scaling)
        judged = question.writer.judge(actual[rows], part)
        if not judged.outside:
            return judged.order
    return question.writer.recent(actual, whole)


def _rows_of_delta(question: MergeQuestion, start: int, stop: int) -> int | None:
    """Return the first row of the delta that some rows of the tensor hold in the place of their own."""
    target, size = question.target, stop - start
    left, right = target.left[0], target.right[0]
    for other in range(0, len(left) - size + 1, size):
        if other == start:
            continue
        moved = LowRankSum(question.base[0][start:stop], left[other : other + size], right, target.scaling)
        if not question.writer.judge(question.actual[0][start:stop], moved).outside:
            return other
    return None


def _by_expert(question: MergeQuestion) -> Explanations:
    """Explain a stack of matrices of which some are right, and others hold the base alone."""
    target, states = question.target, []
    for matrix, low_rank_sum in question.sums(target.left, target.right, target.scaling):
        if not question.writer.judge(matrix, low_rank_sum).outside:
            states.append(_RIGHT)
        elif not question.writer.judge(matrix, replace(low_rank_sum, scaling=0.0)).outside:
            states.append(_BASE_ALONE)
        else:
            states.append(_ELSE)
    if _ELSE in states or len(set(states)) < 2:
        return {}
    runs = _runs(torch.tensor(states))
    return {MergeCause.EXPERTS_LEFT_OUT: _described(runs, {}, _STATE_TEXTS, noun="expert")}


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
    return {(i * size, (i + 1) * size): part for i, part in enumerate(fused)}


def _described(
    runs: list[tuple[int, int, int]], names: dict[tuple[int, int], str], texts: dict[int, str], *, noun: str = "row"
) -> str:
    """Return which rows or experts hold what, and the parts whose delta was left out."""
    parts = []
    for start, stop, state in runs[:_MOST_RUNS]:
        is_single = stop - start == 1
        where = f"{noun} {start}" if is_single else f"{noun}s {start}-{stop - 1}"
        if (start, stop) in names:
            where += f" ({names[start, stop]})"
        verb = "holds" if is_single else "hold"
        parts.append(f"{where} {verb} {texts[state]}")
    if more_runs := and_more(len(runs) - _MOST_RUNS, "run"):
        parts.append(more_runs)
    text = ", ".join(parts)
    left_out = []
    for start, stop, state in runs:
        if state == _BASE_ALONE and (start, stop) in names:
            left_out.append(names[start, stop])
    return f"{text}: the delta of {' and '.join(left_out)} was left out" if left_out else text


def _is_on_four_bits(question: MergeQuestion) -> bool:
    """Return whether the base was rounded to nf4 before the merge: one scale per block of 64 explains all of them."""
    target, table = question.target, torch.tensor(_NF4, dtype=torch.float64)
    middles = (table[1:] + table[:-1]) / 2
    u = UNIT_ROUNDOFF.get(question.actual.dtype, 0.0)
    if question.base[0].numel() % 64:
        return False
    rows = slice(0, -(-64 * _SAMPLE // question.base.shape[2]) * 64)  # whole blocks
    for matrix, low_rank_sum in question.sums(target.left, target.right, target.scaling):
        values, delta = low_rank_sum.base[rows].double(), low_rank_sum.delta(rows)
        # The level of each value of the base, by the largest of its block.
        blocks = values.reshape(-1, 64)
        levels = table[torch.bucketize(blocks / blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-300), middles)]
        # What the folder holds without the delta has to be these levels times one scale, by least squares.
        before = (matrix[rows].double() - delta).reshape(-1, 64)
        scale = (before * levels).sum(dim=1, keepdim=True) / levels.square().sum(dim=1, keepdim=True).clamp(min=1e-300)
        size = (matrix[rows].double().abs() + delta.abs()).reshape(-1, 64) + (levels * scale).abs()
        allowed = 3 * u * size.amax(dim=1, keepdim=True)
        if not bool(((before - levels * scale).abs() <= allowed).all()):
            return False
    return bool(question.actual.numel())
