"""Explain a tensor by its rows, or its experts: some hold the base alone, or the delta of other rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from consistency.capture.wording import and_more
from consistency.extras.merging.check_merged.base_rows import like_base, rows_of_base
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.layouts import parts_of
from consistency.extras.merging.check_merged.orders import LowRankSum
from consistency.extras.merging.check_merged.outside import judge
from consistency.extras.merging.check_merged.question import SAMPLE, MergeQuestion
from consistency.numerics.typed import HALF_TYPES

_MOST_RUNS = 6
"""Stretches of rows, or of experts, in an explanation."""

_RIGHT, _BASE_ALONE = -1, -2
"""States of a row or an expert: base + adapter, or the base alone. Others are the row whose delta it has."""

_NEAREST = 0.5
"""Distance from the row of the delta that it holds, over the size of that row: that of another is 1.4 in the mean."""

_LEAST_CLEAR = 0.9
"""Part of the sampled rows that have to be near a row of the delta."""

_MOST_LOST = 256
"""Rows of the base that are looked at for whether rounding took their delta."""

_SMALLEST = 1e-30
"""Size that divides where a row of the delta is zero."""

_BLOCK = 1 << 22
"""Pairs of rows that are compared at once."""


def by_rows(question: MergeQuestion) -> dict[MergeCause, str]:
    """Explain a matrix of which some rows are right, and others hold the base or the delta of other rows.

    It is named where every element of these rows is what the base and these deltas make.
    """
    target, actual, base = question.target, question.actual[0], question.base[0]
    count = len(base)
    if count < 2 or not target.scaling:
        return {}
    whole = LowRankSum(base, target.left[0], target.right[0], target.scaling)
    unchanged = like_base(actual, base)
    is_explained = 0 < int(unchanged.sum()) < count and question.holds_in_rows(~unchanged)
    if not is_explained:
        unchanged = rows_of_base(actual, base, unchanged)
    states = torch.where(unchanged, _BASE_ALONE, _RIGHT)
    changed = (~unchanged).nonzero().reshape(-1)
    if not len(changed):
        return {}
    if not is_explained and len(changed) < count:
        # the rows of the base may have been rounded less often than the others
        is_explained = question.writer.explains(actual[changed].contiguous(), whole.part(changed))
    if is_explained:
        states = _without_lost(question, whole, states)
        if not bool((states == _BASE_ALONE).any()):
            return {}
        return {MergeCause.PART_LEFT_OUT: _described(states, question, target.name)}
    origins = _origins(question, changed)
    if origins is None or torch.equal(origins, changed):
        return {}
    moved = replace(whole, base=base[changed].contiguous(), left=whole.left[origins])
    if not question.writer.explains(actual[changed].contiguous(), moved):
        return {}
    states[changed] = torch.where(origins == changed, _RIGHT, origins)
    runs = _runs(states)
    is_permuted = len(runs) > _MOST_RUNS and len(origins.unique()) == len(origins)
    cause = MergeCause.ROW_ORDER if is_permuted else MergeCause.OTHER_PART
    return {cause: _described(states, question, target.name)}


def _without_lost(question: MergeQuestion, whole: LowRankSum, states: torch.Tensor) -> torch.Tensor:
    """Return the states with those rows as right that hold the base since rounding takes their whole delta."""
    alone = (states == _BASE_ALONE).nonzero().reshape(-1)
    if len(_runs(states)) <= _MOST_RUNS or len(alone) > _MOST_LOST:
        return states
    part = whole.part(alone)
    order = question.writer.recent(question.actual[0], part)
    is_right = judge(question.actual[0][alone].contiguous(), part, order, patient=True).rows == 0
    states[alone[is_right]] = _RIGHT
    return states


def _origins(question: MergeQuestion, rows: torch.Tensor) -> torch.Tensor | None:
    """Return the row of the delta that each of some rows of the tensor holds; None where they hold no rows of it.

    The change of a row is projected onto the rows of A, and the nearest row of B taken, in the norm of the delta.
    """
    left, right = (factor[0].double() for factor in (question.target.left, question.target.right))
    gram = right @ right.T
    root, failed = torch.linalg.cholesky_ex(gram)
    if int(failed) or not bool(left.any()):
        return None
    # float32 is exact enough for what half types hold: which row is the nearest is only a guess
    dtype = torch.float32 if question.actual.dtype in HALF_TYPES else torch.float64
    rows_of_delta, root, right = (left @ root).to(dtype), root.to(dtype), right.to(dtype)
    sizes = rows_of_delta.norm(dim=1).clamp(min=_SMALLEST)

    def nearest(some: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        change = question.actual[0][some].to(dtype) - question.base[0][some].to(dtype)
        projected = torch.linalg.solve_triangular(root, (change @ right.T).T, upper=False).T / question.target.scaling
        distance, index = torch.cdist(projected, rows_of_delta).min(dim=1)
        return distance / sizes[index], index

    sample = rows[:: max(1, len(rows) // SAMPLE)]
    distance, _ = nearest(sample)
    if float((distance < _NEAREST).double().mean()) < _LEAST_CLEAR:
        return None
    step = max(1, _BLOCK // len(left))
    return torch.cat([nearest(some)[1] for some in rows.split(step)])


def by_expert(question: MergeQuestion) -> dict[MergeCause, str]:
    """Explain a stack of matrices of which some are right, and others hold the base alone."""
    target, states = question.target, []
    for matrix, low_rank_sum in question.sums(target.left, target.right, target.scaling):
        if question.writer.explains(matrix, low_rank_sum):
            states.append(_RIGHT)
        elif question.writer.explains(matrix, replace(low_rank_sum, scaling=0.0)):
            states.append(_BASE_ALONE)
        else:
            return {}
    if len(set(states)) < 2:
        return {}
    text = _described(torch.tensor(states), question, "", noun="expert")
    return {MergeCause.EXPERTS_LEFT_OUT: text}


def _runs(states: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return the stretches of rows with one state, or with the delta of consecutive rows: start, stop and state."""
    follows = states[1:] == states[:-1] + (states[1:] >= 0).int()
    edges = [0, *((~follows).nonzero().reshape(-1) + 1).tolist(), len(states)]
    return [(start, stop, int(states[start])) for start, stop in itertools.pairwise(edges)]


def _described(states: torch.Tensor, question: MergeQuestion, name: str, *, noun: str = "") -> str:
    """Return which rows or experts hold what, and the parts whose delta was left out."""
    noun, runs = noun or question.row, _runs(states)
    names = {edges: part for part, edges in parts_of(name, len(states), question.heads).items()}
    if len(runs) > _MOST_RUNS:
        return _summed_up(states, noun)
    parts = []
    for start, stop, state in runs:
        is_single = stop - start == 1
        where = f"{noun} {start}" if is_single else f"{noun}s {start}-{stop - 1}"
        if (start, stop) in names:
            where += f" ({names[start, stop]})"
        verb = "holds" if is_single else "hold"
        parts.append(f"{where} {verb} {_held(state, stop - start, noun)}")
    text = ", ".join(parts)
    left_out = []
    for part_edges, part in names.items():
        if bool((states[slice(*part_edges)] == _BASE_ALONE).all()):
            left_out.append(part)
    return f"{text}: the delta of {' and '.join(left_out)} was left out" if left_out else text


def _held(state: int, count: int, noun: str) -> str:
    """Return what `count` rows of one state hold."""
    if state == _RIGHT:
        return "base + adapter"
    if state == _BASE_ALONE:
        return "the base"
    return f"the delta of {noun} {state}" if count == 1 else f"the delta of {noun}s {state}-{state + count - 1}"


def _summed_up(states: torch.Tensor, noun: str) -> str:
    """Return how many rows hold what, where they change too often to be listed."""
    parts = []
    for state, text in ((_RIGHT, "base + adapter"), (_BASE_ALONE, "the base")):
        if number := int((states == state).sum()):
            parts.append(f"{number} of {len(states)} {noun}s hold {text}")
    moved = (states >= 0).nonzero().reshape(-1).tolist()
    if moved:
        first = [f"{noun} {row} that of {int(states[row])}" for row in moved[:3]]
        parts.append(f"{len(moved)} hold the delta of other {noun}s: {', '.join(first)}")
        parts += [more] if (more := and_more(len(moved) - 3, noun)) else []
    return ", ".join(parts)
