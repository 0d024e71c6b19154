"""Judge one tensor of a merged folder: its elements against what the adapter makes of the base's tensor."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import torch

from consistency.extras.merging.check_merged.adapter import (
    Adapter,
    ByForm,
    ByPeft,
    LowRankTarget,
    Replaced,
    Target,
)
from consistency.extras.merging.check_merged.by_method import judge_by_method, other_scaling
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.difference import difference
from consistency.extras.merging.check_merged.effect import Effect
from consistency.extras.merging.check_merged.explain import Explainer
from consistency.extras.merging.check_merged.folder import Folder, Stored
from consistency.extras.merging.check_merged.merge_writer import MergeWriter
from consistency.extras.merging.check_merged.non_finite import (
    NonFiniteElements,
    is_target_finite,
    non_finite_elements,
)
from consistency.extras.merging.check_merged.orders import Order
from consistency.extras.merging.check_merged.outside import OutsideElements, half_of, same_bits
from consistency.extras.merging.check_merged.question import Heads, MergeQuestion
from consistency.extras.merging.check_merged.rest import measured
from consistency.extras.merging.check_merged.state import MergedFolder, TensorState
from consistency.extras.merging.check_merged.summed import SummedTarget, SumWriter
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.typed import HALF_TYPES

_MOST_QUANTIZED = 1 << 27
"""Elements of the largest quantized tensor that is judged, which takes some arrays of it in float64."""

_MOST_TRIES = 4
"""Tensors of other methods than LoRA whose scaling is looked for in vain."""

_LEAST_LEFT = 0.5
"""Part of a delta that has to be left after quantizing; less is a problem of the folder."""


class TensorJudge:
    """Judges tensors of a folder, in several threads at a time.

    Parameters
    ----------
    adapter : Adapter
        What is to be added; without targets where no adapter is given.
    before, after : Folder
        The base and the merged folder.
    result : MergedFolder
        Where problems, orders and effects of all tensors are added.
    compares_bases : bool
        Whether there is no adapter: then it is told what differs from the base.
    """

    def __init__(
        self, *, adapter: Adapter, before: Folder, after: Folder, result: MergedFolder, compares_bases: bool
    ) -> None:
        self._adapter, self._before, self._after, self._result = adapter, before, after, result
        self._compares_bases = compares_bases
        self.low_rank_targets = [target for target in adapter.targets.values() if isinstance(target, LowRankTarget)]
        # Tensors whose values went through a half type that is not their own, and its name.
        self.half_types: dict[str, str] = {}
        self._writer, self._sum_writer, self._counting = MergeWriter(), SumWriter(), threading.Lock()
        self._explainer, self._heads = Explainer(), Heads.of(before.config)
        self._tries_scalings = _MOST_TRIES
        self._reading = 0  # which of the ways to read the base fitted the last tensor

    def judge(self, name: str, base: Stored, merged: Stored, target: Target | None) -> TensorState:
        """Return the state of a tensor that base and folder have; `target` is the adapter's part, if any."""
        state = TensorState.of(name, merged, target)
        if target is not None and not is_target_finite(target):
            state.mark_wrong(state.elements)
            state.causes = {MergeCause.ADAPTER_NOT_FINITE: ""}
            return state
        is_quantized = merged.step is not None or merged.dtype not in UNIT_ROUNDOFF or base.dtype not in UNIT_ROUNDOFF
        if is_quantized:
            self._judge_quantized(state, base, merged, target)
        elif isinstance(target, Replaced):
            self.judge_saved(state, merged.read(), target, base.read())
        elif merged.shape != base.shape:
            self._judge_resized(state, base, merged, target)
        else:
            state = self._judge_readings(state, base, merged, target)
        if state.status == "outside" and name in self._adapter.shared:
            text = f"{self._adapter.shared[name]} adapted modules share {name}, which cannot hold the results of all"
            state.causes = {MergeCause.TIED: text}
        return state

    def _judge_readings(self, state: TensorState, base: Stored, merged: Stored, target: Target | None) -> TensorState:
        """Judge a tensor by each way to read the base; that which fitted the last one is tried first."""
        actual, converted_base = merged.read(), self._adapter.bases.get(state.name)
        if converted_base is not None:
            self._judge_unquantized(state, actual, converted_base, target)
            return state
        readings = (base.read, *base.variants)
        first = self._reading if self._reading < len(readings) else 0
        states: dict[int, TensorState] = {}
        for number in dict.fromkeys((first, *range(len(readings)))):
            states[number] = judged = replace(state, causes={})
            before = readings[number]()
            self._judge_unquantized(judged, actual, before, target)
            if judged.status != "outside":
                self._reading = number
                return judged
            if number == 0:
                self._try_sixteen_bit_base(judged, actual, before, base, target)
        return states[0]

    def _try_sixteen_bit_base(
        self, state: TensorState, actual: torch.Tensor, before: torch.Tensor, base: Stored, target: Target | None
    ) -> None:
        """Explain a wrong tensor by a merge into the weight of which the base's is the quantized form."""
        is_unexplained = state.status == "outside" and not state.causes and state.elements <= _MOST_QUANTIZED
        if is_unexplained and base.step is not None and isinstance(target, LowRankTarget | None):
            values = actual.double() - _exact_delta(target, before.shape)
            if bool(((values - before.double()).abs() <= base.step(values)).all()):
                state.causes = {MergeCause.SIXTEEN_BIT_BASE: ""}

    def _judge_unquantized(
        self, state: TensorState, actual: torch.Tensor, before: torch.Tensor, target: Target | None
    ) -> None:
        """Judge a tensor by the kind of its target, and then the elements that the merge made NaN or infinite."""
        non_finite = non_finite_elements(actual, before, target)
        if target is None:
            self._judge_untouched(state, _without(non_finite, actual, before), before)
        elif isinstance(target, LowRankTarget):
            self._judge_low_rank(state, actual, before, target)
        elif not isinstance(target, Replaced):
            self._judge_by_method(state, actual, before, target)
            if non_finite is not None:  # its measure does not tell whether anything else is wrong
                state.status = "within"
        if non_finite is not None:
            self._mark_non_finite(state, non_finite)

    def _mark_non_finite(self, state: TensorState, non_finite: NonFiniteElements) -> None:
        """Mark the elements that the merge made NaN or infinite, beside what else is wrong with the tensor."""
        if self._compares_bases or state.status == "outside":
            self._result.add_problem(MergeCause.OVERFLOW, f"{state.name}: {non_finite.text}", [state.name])
            state.mark_wrong(state.outside + non_finite.count, state.reason)
        else:
            state.mark_wrong(non_finite.count)
            state.causes = {MergeCause.OVERFLOW: non_finite.text}
        if state.worst is None:
            state.worst = (non_finite.index, non_finite.actual, non_finite.exact, non_finite.exact)

    def _judge_by_method(
        self, state: TensorState, actual: torch.Tensor, before: torch.Tensor, target: ByForm | ByPeft
    ) -> None:
        """Judge a tensor by a closed form of the adapter's method, or by PEFT's own merge."""
        if self._adapter.drawn is not None:
            state.mark_skipped("every load of the adapter merges to other weights")
            return
        judgement = judge_by_method(actual, before, target)
        if judgement is None:
            state.mark_skipped("PEFT does not merge it by itself, and it has no closed form")
            return
        measure, ratio, text = judgement
        if ratio <= 1:
            return
        state.mark_wrong(max(1, int(measure.mismatched)), f"by a merge in {text}")
        if measure.worst_index is not None:
            exact, allowed = float(measure.worst_expected or 0.0), float(measure.allowed or 0.0)
            state.worst = (measure.worst_index, float(measure.worst_actual or 0.0), exact - allowed, exact + allowed)
        if torch.equal(actual, before.to(actual.dtype)):
            state.causes = {MergeCause.NOT_MERGED: ""}
        elif target.plain is not None:
            # The low-rank part alone was added: without DoRA's magnitude, or not to the residual base.
            question = self._question(actual, before, target.plain)
            if question.holds(target.plain.left, target.plain.right, target.plain.scaling):
                cause = MergeCause.MAGNITUDE if isinstance(target, ByForm) else MergeCause.RESIDUAL_BASE
                state.causes = {cause: ""}
        if not state.causes and self._tries_scalings > 0:
            state.causes = other_scaling(actual, before, target)
            self._tries_scalings -= not state.causes

    def _question(self, actual: torch.Tensor, before: torch.Tensor, target: LowRankTarget) -> MergeQuestion:
        others = self.low_rank_targets
        return MergeQuestion(
            actual=actual.reshape(target.shape),
            base=before.reshape(target.shape),
            target=target,
            writer=self._writer,
            others=sorted({other.scaling for other in others} - {target.scaling}),
            layers=[other for other in others if other.shape == target.shape and other.name != target.name],
            heads=self._heads,
        )

    def _judge_low_rank(
        self, state: TensorState, actual: torch.Tensor, before: torch.Tensor, target: LowRankTarget
    ) -> None:
        """Judge a tensor to which the adapter adds a low-rank delta, matrix by matrix of a stack."""
        half = half_of(actual)
        if half is not None and not torch.equal(actual, before.to(actual.dtype)):
            # All values are numbers of a half type: they are judged as what they were rounded to.
            actual, self.half_types[state.name] = actual.to(half), name_of(half)
        question = self._question(actual, before, target)
        wrong: list[tuple[int, OutsideElements]] = []
        effect, orders = Effect(), Counter[Order]()
        for number, (matrix, low_rank_sum) in enumerate(question.sums(target.left, target.right, target.scaling)):
            judged = self._writer.judge(matrix, low_rank_sum)
            if judged.outside:
                wrong.append((number, judged))
            else:
                effect.add(matrix, low_rank_sum)
                orders[judged.order] += 1
        with self._counting:
            self._result.effect.include(effect)
            self._result.orders.update(orders)
        if wrong and isinstance(target, SummedTarget) and self._is_merged_in_turn(state, question, target):
            return
        if not wrong:
            return
        matrix_elements = question.base[0].numel()
        state.mark_wrong(sum(max(1, round(judged.share * matrix_elements)) for _, judged in wrong))
        number, worst = max(wrong, key=lambda numbered: numbered[1].outside)
        if worst.worst is not None:
            row, column, *values = worst.worst
            # as many indices as the tensor has dimensions: a vector is a column, and a kernel of a convolution flat
            place = (number * target.shape[1] + row) * target.shape[2] + column
            index = tuple(int(i) for i in np.unravel_index(place, actual.shape))
            state.worst = (index, values[0], values[1], values[2])
        state.causes = state.causes or self._explainer.explain(question)
        if not state.causes and self._explainer.measures:
            state.reason, state.advice = measured(question)

    def _is_merged_in_turn(self, state: TensorState, question: MergeQuestion, target: SummedTarget) -> bool:
        """Return whether several adapters were merged one after the other; else name those that are left out."""
        pairs = list(enumerate(zip(question.actual, question.base, strict=True)))
        judged = [self._sum_writer.judge(matrix, base, target, number) for number, (matrix, base) in pairs]
        if not any(one.outside for one in judged):
            with self._counting:
                self._result.orders.update(one.order for one in judged)
            return True
        number, (matrix, base) = max(pairs, key=lambda pair: judged[pair[0]].outside)
        left_out = self._sum_writer.left_out(matrix, base, target, number)
        if left_out:
            state.causes = {MergeCause.ADAPTER_LEFT_OUT: f"{left_out} is left out"}
        return False

    def _judge_untouched(self, state: TensorState, actual: torch.Tensor, before: torch.Tensor) -> None:
        """Judge a tensor that should be the base's, in its own dtype."""
        state.status = "equal" if actual.dtype == before.dtype else "within"
        if self._is_cast_of(state, actual, before):
            return
        expected = before.to(actual.dtype)
        is_different = (actual != expected) & ~(actual.isnan() & expected.isnan())
        if not is_different.any():
            state.status = "equal"  # zeros of another sign
            return
        state.mark_wrong(int(is_different.sum()))
        if self._compares_bases:
            state.difference = difference(actual, before)
            state.reason = state.difference.text
        else:
            index = tuple(int(i) for i in is_different.nonzero()[0])
            state.worst = (index, float(actual[index]), float(expected[index]), float(expected[index]))

    def judge_saved(
        self, state: TensorState, actual: torch.Tensor, target: Replaced, before: torch.Tensor | None
    ) -> None:
        """Judge a tensor that the adapter has whole, or of which it has some rows; `before` is the base's, if any."""
        state.role, state.status = "saved", "equal"
        value = target.value
        if target.rows is not None:
            assert before is not None
            value = before.to(value.dtype).index_copy(0, target.rows, value)
        non_finite = non_finite_elements(actual, None, replace(target, value=value, rows=None))
        if not self._is_cast_of(state, _without(non_finite, actual, value), value):
            state.mark_wrong(actual.numel(), f"the adapter's file has it whole, {tuple(value.shape)}")
            if before is not None and _way_of_cast(actual, before) is not None:
                state.causes = {MergeCause.SAVED_DROPPED: ""}
        if non_finite is not None:
            self._mark_non_finite(state, non_finite)

    def _is_cast_of(self, state: TensorState, actual: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether a tensor holds a value in its own dtype; one that went through a half type is noted."""
        half_type = _way_of_cast(actual, value)
        if half_type:
            state.status, self.half_types[state.name] = "within", half_type
        return half_type is not None

    def _judge_resized(self, state: TensorState, base: Stored, merged: Stored, target: Target | None) -> None:
        """Judge the first rows of a tensor that has more, or fewer, than the base's."""
        rows = min(base.shape[0], merged.shape[0]) if base.shape and merged.shape else 0
        if rows == 0 or base.shape[1:] != merged.shape[1:]:
            state.mark_wrong(state.elements, f"shape {list(merged.shape)}, the base has {list(base.shape)}")
            return
        if isinstance(target, SummedTarget):
            target = target.first_rows(rows)
        elif isinstance(target, LowRankTarget):
            target = replace(target, left=target.left[:, :rows])
        self._judge_unquantized(state, merged.read()[:rows], base.read()[:rows], target)
        result = "are right" if state.status in ("equal", "within") else "are wrong"
        text = f"{state.name} has {merged.shape[0]} rows, the base {base.shape[0]}: the first {rows} {result}"
        self._result.add_problem(MergeCause.RESIZED, text, [state.name], "warning")

    def _judge_quantized(self, state: TensorState, base: Stored, merged: Stored, target: Target | None) -> None:
        """Judge a tensor that is quantized in the folder: by half a step around its exact value."""
        is_too_large = state.elements > _MOST_QUANTIZED
        if merged.step is None or not isinstance(target, LowRankTarget | None) or is_too_large:
            if target is None and merged.shape == base.shape and merged.dtype == base.dtype:
                self._judge_untouched(state, merged.read(), base.read())
            else:
                unread = self._after.unread.get(state.name) or self._before.unread.get(state.name)
                state.mark_skipped(unread or f"{state.dtype} is not judged here")
            return
        actual, before = merged.read().double(), base.read()
        delta = _exact_delta(target, before.shape)
        exact = before.double() + delta
        # The writer may have rounded sum and delta before it quantized.
        unit = max(UNIT_ROUNDOFF.get(dtype, 0.0) for dtype in (torch.float16, before.dtype))
        before = before.double()
        allowed = merged.step(exact) + 2 * unit * (before.abs() + delta.abs())
        is_wrong = ~((actual - exact).abs() <= allowed)
        if base.step is not None:
            self._note_lost_delta(state, actual - before, delta)
        if not is_wrong.any():
            return
        state.mark_wrong(int(is_wrong.sum()))
        index = tuple(int(i) for i in is_wrong.nonzero()[0])
        middle, room = float(exact[index]), float(allowed[index])
        state.worst = (index, float(actual[index]), middle - room, middle + room)
        if bool(((actual - before).abs() <= merged.step(before)).all()):
            state.causes = {MergeCause.NOT_MERGED: ""}
        elif merged.codes is not None:
            # Codes that are the exact values themselves, or the base's codes plus the delta: divided by no scale.
            intended = [exact] if base.codes is None else [exact, base.codes().double() + delta]
            codes = merged.codes
            if any(_near_codes(codes(), values) for values in intended):
                state.causes = {MergeCause.CODES: ""}

    def _note_lost_delta(self, state: TensorState, change: torch.Tensor, delta: torch.Tensor) -> None:
        """Add a problem where quantizing took most of the delta away again.

        That happens where the levels of the base are the nearest to most sums. What is left of the delta is the factor
        of its least-squares fit to the change.
        """
        square = float(delta.square().sum())
        if not square:
            return
        left = float((change * delta).sum()) / square
        if left < _LEAST_LEFT:
            text = f"{state.name} has {max(left, 0.0):.0%} of its delta"
            self._result.add_problem(MergeCause.QUANTIZED_AWAY, text, [state.name], "warning")


def _without(non_finite: NonFiniteElements | None, actual: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the right values in the place of those that the merge made NaN or infinite."""
    if non_finite is None or actual.shape != value.shape:
        return actual
    return torch.where(non_finite.places, value.to(actual.dtype), actual)


def _exact_delta(target: LowRankTarget | None, shape: torch.Size) -> torch.Tensor:
    """Return the delta of a target, float64; zeros without one."""
    if target is None:
        return torch.zeros(shape, dtype=torch.float64)
    return (target.left.double() @ target.right.double()).mul_(target.scaling).reshape(shape)


def _near_codes(codes: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether codes are the nearest numbers of their dtype to these values, but for some that are cut."""
    step = torch.finfo(codes.dtype).eps * values.abs().clamp(min=float(torch.finfo(codes.dtype).smallest_normal))
    is_far = ~((codes.double() - values).abs() <= step)
    return float(is_far.double().mean()) < 0.01


def _way_of_cast(actual: torch.Tensor, base: torch.Tensor) -> str | None:
    """Return the half type by way of which a tensor is another one cast to its dtype.

    Empty where the cast is a direct one, None where the tensor is no cast of the other.
    """
    if actual.shape != base.shape:
        return None
    if same_bits(actual, base.to(actual.dtype)):
        return ""
    for half in HALF_TYPES:
        if half not in (actual.dtype, base.dtype) and same_bits(actual, base.to(half).to(actual.dtype)):
            return name_of(half)
    return None
