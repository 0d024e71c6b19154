"""Explain a tensor that is not base + adapter: each mistake is computed and compared with the tensor.

A least-squares fit of the difference by the delta, of some rows, says which mistakes are worth computing. One that is
named holds for every element, by the roundings of a writer (`orders.py`): nothing is concluded from a resemblance, but
for a scaling that has no name, which is said to be fitted, and another adapter, whose rank is what is known of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from consistency.capture.names import split_name
from consistency.extras.merging.check_merged.adapter import LowRankTarget
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.layouts import named_orders
from consistency.extras.merging.check_merged.levels import base_levels, levels_after
from consistency.extras.merging.check_merged.outside import judge, part_beyond_all
from consistency.extras.merging.check_merged.question import FEW, Candidate, MergeQuestion, is_fit, is_near
from consistency.extras.merging.check_merged.rest import name_rest
from consistency.extras.merging.check_merged.rows import by_expert, by_rows

_MOST_APART = 0.1
"""Part of the elements that may be outside of a scaling that is only fitted, whose own error moves some of them."""

_MOST_IN_VAIN = 4
"""Unexplained tensors after which all others are held against the mistakes that were found before, and no more."""

_ALPHA_OF_PEFT = 8.0
"""The value that PEFT takes for a `lora_alpha` that is absent."""

_MOST_MEASURED = 8
"""Unexplained tensors that are measured: a report has lines for fewer."""

_MOST_BEYOND = 1e-3
"""Part of the elements that may be beyond all roundings of a scaling that is only fitted."""

_NOT_A_RANK = 0.45
"""Distance from 0 and 1 at which the factor of a rank tells neither that it was merged nor that it was left out."""

Explanations = dict[MergeCause, str]
Strategy = Callable[[MergeQuestion], Explanations]


class Explainer:
    """Explains the tensors of one folder: what explained others is tried first."""

    def __init__(self) -> None:
        self._found: list[Strategy] = []
        self._in_vain = self._unexplained = 0

    def explain(self, question: MergeQuestion) -> Explanations:
        """Return the mistakes that explain a tensor with a low-rank delta, each with a text about it."""
        is_in_vain = self._in_vain >= _MOST_IN_VAIN
        strategies: list[Strategy] = [*self._found, *(one for one in _STRATEGIES if one not in self._found)]
        if is_in_vain:
            strategies = list(dict.fromkeys((_not_merged, _scalings, *self._found)))
        for strategy in strategies:
            if explanations := strategy(question):
                self._found = [strategy, *(one for one in self._found if one is not strategy)]
                return explanations
        self._in_vain += 1
        # a rest that has no name but its rank comes after all mistakes, which explain it better
        explanations = name_rest(question, briefly=is_in_vain)
        self._unexplained += not explanations
        return explanations

    @property
    def measures(self) -> bool:
        """Return whether tensors without an explanation are still measured, which takes time."""
        return self._unexplained <= _MOST_MEASURED

    @property
    def is_in_vain(self) -> bool:
        """Return whether enough tensors were looked at for mistakes in vain."""
        return self._in_vain >= _MOST_IN_VAIN


def _not_merged(question: MergeQuestion) -> Explanations:
    target = question.target
    return {MergeCause.NOT_MERGED: ""} if question.holds(target.left, target.right, 0.0) else {}


def _delta_alone(question: MergeQuestion) -> Explanations:
    return {MergeCause.DELTA_ALONE: ""} if question.is_delta_alone() else {}


def _scalings(question: MergeQuestion) -> Explanations:
    """Explain by mistakes of the scaling: those with a name, or else the scaling that fits."""
    target = question.target
    fitted, left_over = question.fit(target.left, target.right)
    if not is_fit(left_over):
        return {}
    if target.is_bias and is_near(fitted, 1.0) and question.holds(target.left, target.right, 1.0):
        return {MergeCause.BIAS_UNSCALED: ""}
    explanations: Explanations = {}
    if is_near(fitted, 2 * target.scaling) and _is_merged_twice(question):
        explanations[MergeCause.TWICE] = ""
    names = []
    for scaling, texts in _named_scalings(question).items():
        is_likely = scaling != target.scaling and is_near(fitted, scaling)
        if is_likely and question.holds(target.left, target.right, scaling):
            names += texts
    if names:
        explanations[MergeCause.WRONG_SCALE] = f"{' or '.join(names)} instead of {target.scaling:g}"
    elif not explanations and not is_near(fitted, target.scaling) and _is_within_fitted(question, fitted):
        explanations[MergeCause.WRONG_SCALE] = f"{fitted:.4g}, fitted, instead of {target.scaling:g}"
    return explanations


def _is_merged_twice(question: MergeQuestion) -> bool:
    left, right, scaling = question.target.left, question.target.right, question.target.scaling
    return question.holds(left, right, scaling, is_twice=True) or question.holds(left, right, 2 * scaling)


def _is_within_fitted(question: MergeQuestion, fitted: float) -> bool:
    """Return whether most elements are base + delta by a fitted scaling, which is not exact: some may be outside."""
    for matrix, low_rank_sum in question.sums(question.target.left, question.target.right, fitted):
        rows = low_rank_sum.sample
        part = low_rank_sum.part(rows)
        actual, order = matrix[rows].contiguous(), question.writer.recent(matrix, part)
        if judge(actual, part, order, patient=True).share >= _MOST_APART:
            return False
        if part_beyond_all(actual, part) > _MOST_BEYOND:
            return False
    return True


def _named_scalings(question: MergeQuestion) -> dict[float, list[str]]:
    """Return the words for each scaling that a merge may take by mistake."""
    target = question.target
    named = [*target.scalings.items()]
    named += [(f"that of another module ({other:g})", other) for other in question.others]
    named += [(f"1/{n} of it, as a rank's share", target.scaling / n) for n in (2, 4, 8)]
    named.append(("its negative", -target.scaling))
    if target.alpha != _ALPHA_OF_PEFT:
        scaling = _ALPHA_OF_PEFT / max(1, target.rank)
        named.append((f"{_ALPHA_OF_PEFT:g} / r, as PEFT has it without lora_alpha ({scaling:g})", scaling))
    texts: dict[float, list[str]] = {}
    for text, scaling in named:
        texts.setdefault(scaling, []).append(text)
    return texts


def _other_layouts(question: MergeQuestion) -> Explanations:
    """Explain by the same delta in another layout."""
    explanations: Explanations = {}
    for candidate in _rearranged(question):
        if question.is_likely(candidate) and question.holds(candidate.left, candidate.right, candidate.scaling):
            explanations[candidate.cause] = candidate.text
    return explanations


def _rearranged(question: MergeQuestion) -> Iterator[Candidate]:
    """Yield the delta in each layout that a merge may take by mistake."""
    target = question.target
    left, right = target.left, target.right
    stack, rows, columns = target.shape

    def candidate(cause: MergeCause, text: str, left: torch.Tensor, right: torch.Tensor) -> Candidate:
        return Candidate(cause=cause, text=text, left=left, right=right, scaling=target.scaling)

    if rows == columns:
        yield candidate(MergeCause.TRANSPOSED, "", right.transpose(1, 2), left.transpose(1, 2))
    for cause, text, order in named_orders(target.name, rows, question.heads):
        yield candidate(cause, text, left[:, order], right)
    for cause, text, order in named_orders(target.name, columns, question.heads):
        text_of_columns = text if stack > 1 else f"of its columns: {text}"
        yield candidate(cause, text_of_columns, left, right[:, :, order])
    if len(target.flat) == 2 and stack > 1:
        yield from _other_packing(target, stack)


def _other_packing(target: LowRankTarget, stack: int) -> Iterator[Candidate]:
    """Yield the factors of experts as a merge has them that takes the expert for the other index of A or B."""
    a, b = target.flat
    rank = a.shape[0] // stack
    # by the name of the factor that is taken otherwise than by PEFT; empty where it is taken as by PEFT
    rights = {"": a.view(stack, rank, -1), "lora_A": a.view(rank, stack, -1).transpose(0, 1)}
    lefts = {"": b.view(-1, rank, stack).permute(2, 0, 1), "lora_B": b.view(-1, stack, rank).permute(1, 0, 2)}
    cause, scaling = MergeCause.EXPERT_ORDER, target.scaling
    for other_b, left in lefts.items():
        for other_a, right in rights.items():
            names = " and ".join(name for name in (other_a, other_b) if name)
            if not names:
                continue
            index = "slower" if other_b else "faster"
            text = f"{names} with the expert as the {index} index"
            if left.shape == target.left.shape and right.shape == target.right.shape:
                yield Candidate(cause=cause, text=text, left=left, right=right, scaling=scaling)
            over_left, over_right = right.transpose(1, 2), left.transpose(1, 2)
            if over_left.shape == target.left.shape and over_right.shape == target.right.shape:
                yield Candidate(cause=cause, text=text, left=over_left, right=over_right, scaling=scaling)


def _other_layers(question: MergeQuestion) -> Explanations:
    """Explain by the delta of other layers, with their scaling or the tensor's own."""
    layers = []
    for other in question.layers:
        factor, left_over = question.fit(other.left, other.right, rows=FEW)
        if not is_fit(left_over):
            continue
        for scaling in dict.fromkeys((other.scaling, question.target.scaling)):
            if is_near(factor, scaling) and question.holds(other.left, other.right, scaling):
                layers.append(split_name(other.name)[0])
                break
    return {MergeCause.OTHER_LAYER: " or ".join(layers)} if layers else {}


def _some_ranks(question: MergeQuestion) -> Explanations:
    """Explain by some of the ranks of the delta, with its scaling or one that is computed from their number."""
    target = question.target
    rank = target.left.shape[2]
    if target.shape[0] != 1 or rank < 2:
        return {}
    factors = question.fit_ranks()
    is_merged = factors.abs() > 0.5
    count = int(is_merged.sum())
    if not 0 < count < rank:
        return {}
    factor = float(factors[is_merged].mean())
    left, right = target.left[:, :, is_merged], target.right[:, is_merged]
    for text, times in (("", 1.0), (f", scaled by lora_alpha / {count}", rank / count)):
        is_likely = abs(factor - times) < _NOT_A_RANK
        if is_likely and question.holds(left, right, times * target.scaling):
            return {MergeCause.SOME_RANKS: f"{_numbers(is_merged)} of {rank}{text}"}
    return {}


def _numbers(is_merged: torch.Tensor) -> str:
    """Return the ranks that were merged: `ranks 0-7`, or how many they are where they have no order."""
    numbers = is_merged.nonzero().reshape(-1).tolist()
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    for step in range(1, len(is_merged)):
        if numbers == list(range(numbers[0], numbers[-1] + 1, step)):
            text = f"ranks {numbers[0]}-{numbers[-1]}"
            return text if step == 1 else f"every {step}. of the {text}"
    return f"{len(numbers)} ranks"


def _parts(question: MergeQuestion) -> Explanations:
    """Explain by rows, columns or experts of which some are right and others are not."""
    if question.target.shape[0] > 1:
        return by_expert(question)
    if not question.is_matrix:
        return by_rows(question)
    return by_rows(question) or by_rows(question.transposed())


_STRATEGIES: tuple[Strategy, ...] = (
    _not_merged,
    _scalings,
    _delta_alone,
    _other_layouts,
    _other_layers,
    _some_ranks,
    _parts,
    base_levels,
    levels_after,
)
"""What may explain a tensor, the simplest first."""
