"""Check a merged folder: every tensor of base and folder against what the adapter makes of it."""

from __future__ import annotations

import concurrent.futures
import math
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from consistency.capture.adapter_remarks import AdapterRemark
from consistency.capture.names import split_name
from consistency.capture.wording import and_more, counted, some
from consistency.case.case import Case
from consistency.devices.cores import available_cores
from consistency.extras.merging.check_merged import names
from consistency.extras.merging.check_merged.adapter import (
    Adapter,
    ByForm,
    ByPeft,
    LowRankTarget,
    Replaced,
    Target,
    on_model,
    open_adapter,
)
from consistency.extras.merging.check_merged.by_method import judge_by_method
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.difference import Difference, difference
from consistency.extras.merging.check_merged.explain import Explanations, MergeQuestion, explain
from consistency.extras.merging.check_merged.folder import Folder, Problem, Severity, Stored
from consistency.extras.merging.check_merged.formats import open_weights
from consistency.extras.merging.check_merged.non_finite import (
    NonFiniteElements,
    broken_tensors,
    is_target_finite,
    non_finite_elements,
)
from consistency.extras.merging.check_merged.orders import (
    Effect,
    MergeWriter,
    Order,
    OutsideElements,
    half_of,
    same_bits,
)
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.typed import HALF_TYPES
from consistency.worker.model.saved_adapter.loaded import remarks_on
from consistency.worker.model.weight_files import WeightFiles

Status = Literal["equal", "within", "outside", "missing", "unexpected", "skipped"]

_MOST_QUANTIZED = 1 << 27
"""Elements of the largest quantized tensor that is judged, which takes some arrays of it in float64."""

_MOST_IN_VAIN = 8
"""Tensors of which no mistake is found, until all others are only looked at for those that are quick to try."""

_MOST_BROKEN = 4
"""Tensors of the adapter that are not finite and are named."""

_LEAST_LEFT = 0.5
"""Share of a delta that has to be left after quantizing; less is said."""

_LEFTOVER = (".lora_A", ".lora_B", ".base_layer", ".modules_to_save", ".lora_embedding_", "_orig_mod.")


@dataclass(slots=True, kw_only=True)
class TensorState:
    """What is in one tensor of the folder.

    Attributes
    ----------
    role : str
        `adapted`, `saved` (the adapter has it whole), `untouched`, `extra`.
    status : Status
        `equal`, `within`, `outside`, `missing`, `unexpected`, `skipped`.
    outside : int
        Elements that are wrong.
    worst : tuple or None
        Index of one of these, its value, and the ends between which it should be.
    causes : dict of MergeCause to str
        What explains it, each with what it is about.
    is_delta_zero : bool
        Whether the adapter has something for it that adds nothing: a factor of zeros.
    """

    name: str
    role: str
    status: Status
    shape: tuple[int, ...]
    dtype: str
    elements: int
    outside: int = 0
    worst: tuple[tuple[int, ...], float, float, float] | None = None
    causes: Explanations = field(default_factory=dict)
    is_delta_zero: bool = False
    reason: str = ""
    keys: tuple[str, ...] = ()
    difference: Difference | None = None

    def wrong(self, elements: int, reason: str = "") -> None:
        self.status, self.outside, self.reason = "outside", elements, reason


@dataclass(slots=True, kw_only=True)
class MergedFolder:
    """What a check found.

    Attributes
    ----------
    mapping : list of str
        How the names of base, adapter and folder were matched.
    orders : Counter of Order
        Tensors by the order of roundings that explains them.
    effect : Effect
        What rounding took of the adapter's effect.
    remarks : list of AdapterRemark
        What is wrong with the adapter itself.
    """

    tensors: list[TensorState] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    remarks: list[AdapterRemark] = field(default_factory=list)
    mapping: list[str] = field(default_factory=list)
    orders: Counter[Order] = field(default_factory=Counter)
    effect: Effect = field(default_factory=Effect)
    dtype: str = ""

    def of(self, role: str) -> list[TensorState]:
        return [one for one in self.tensors if one.role == role]


def check(case: Case, merged: Path) -> MergedFolder:
    """Check whether a folder, or a file, holds the base + the adapter of a case.

    Without an adapter it is told what differs from the base.

    Raises
    ------
    InputError
        One of them cannot be read.
    """
    before = open_weights(Path(case.base), allow_pickle=case.allow_pickle)
    after = open_weights(merged, allow_pickle=case.allow_pickle, like=before)
    walk = _Walk(case, before, after)
    walk.check()
    return walk.found


class _Walk:
    """The tensors of two folders, by the same names."""

    def __init__(self, case: Case, before: Folder, after: Folder) -> None:
        self._case, self._before, self._after = case, before, after
        self._model: Any = None  # transformers', without weights, where names had to be matched by it
        self.found = MergedFolder(problems=list(after.problems))
        self._writer, self._counting = MergeWriter(), threading.Lock()
        self._in_vain = 0
        self._broken: list[tuple[str, str]] = []  # tensors of the adapter's file that are not finite, and where
        self._through: dict[str, str] = {}  # tensors whose values went through a half type, and its name
        self._base, self._merged = before.tensors, after.tensors
        self._alone = case.adapter is None
        by_names: Adapter | None = Adapter()
        if case.adapter is not None:
            by_names = open_adapter(Path(case.adapter), self._base, allow_pickle=case.allow_pickle)
            files = WeightFiles.of_adapter(case.adapter, allow_pickle=case.allow_pickle)
            self._broken = list(broken_tensors(files))
            self.found.remarks += remarks_on((name, files.read(name)) for name in files.names())
        merged, how = names.renamed(self._merged, self._base)
        wanted = self._base if self._alone or by_names is None else by_names.targets
        if by_names is None or (merged.keys() - self._base.keys() and wanted.keys() - merged.keys()):
            by_names = self._on_model(case, by_names)
            merged, how = names.renamed(self._merged, self._base)
        self._merged, self._adapter = merged, by_names
        self.found.mapping += how
        if by_names.drawn is not None:
            self.found.remarks.append(by_names.drawn)
        self.found.dtype = _most(self._merged.values())
        self._factors = [one for one in self._adapter.targets.values() if isinstance(one, LowRankTarget)]

    def _on_model(self, case: Case, by_names: Adapter | None) -> Adapter:
        """Bring base, folder and adapter to the names of transformers' model."""
        model = self._model = names.model_of(case)
        if model is not None:
            self._base, self._merged = (names.in_model(one, model) for one in (self._before, self._after))
            self.found.mapping.append(f"by transformers' names of {type(model).__name__}")
        if by_names is not None and (self._alone or model is None):
            return by_names
        return on_model(case, model, self._base, _most(self._merged.values()))

    def check(self) -> None:
        """Judge every tensor; several at a time where torch's operations leave cores free."""
        self._about_adapter()
        with concurrent.futures.ThreadPoolExecutor(max(1, available_cores() // torch.get_num_threads())) as pool:
            states = list(pool.map(self._one, self._base.items()))
        self.found.tensors += self._but_for_another_head([state for state in states if state is not None])
        for name in [one for one in self._merged if one not in self._base]:
            self._extra(name, self._merged[name])
        self._summed_up()

    def _one(self, item: tuple[str, Stored]) -> TensorState | None:
        """Return what is in the place of a tensor of the base; None where it need not be there."""
        name, stored = item
        target, here = self._adapter.targets.get(name), self._merged.get(name)
        if here is not None:
            return self._judge(name, stored, here, target)
        if (self._before.ties or self._after.ties) and _names_head(name):
            return None
        state = _state(name, stored, target)
        unread = self._after.unread.get(name, "")
        state.status, state.reason = ("skipped", unread) if unread else ("missing", "the folder does not have it")
        return state

    def _but_for_another_head(self, states: list[TensorState]) -> list[TensorState]:
        """Leave out what the folder lacks because the adapter is for another class than the base: its own head.

        A classifier that was trained on a base for text has no `lm_head`. The class is the adapter's, and the folder's
        config has to name it too: a folder that loads as the base's class needs all of the base.
        """
        absent = {state.name for state in states if state.status == "missing"}
        if self._alone or not absent:
            return states
        model = self._model or names.model_of(self._case)
        if model is None or self._after.config.get("architectures", [type(model).__name__]) != [type(model).__name__]:
            return states
        left_out = absent & names.without_place(self._before, model)
        if left_out:
            lost = some(sorted(left_out))
            text = f"the adapter is for {type(model).__name__}, which has no {lost}: the folder needs none"
            self._note(MergeCause.OTHER_HEAD, text, (), "note")
        return [state for state in states if state.name not in left_out]

    def _note(self, cause: MergeCause, text: str, tensors: Iterable[str], severity: Severity = "error") -> None:
        self.found.problems.append(Problem(cause=cause, text=text, tensors=tuple(tensors), severity=severity))

    def _about_adapter(self) -> None:
        adapter = self._adapter
        if adapter.unmatched:
            text = f"{len(adapter.unmatched)} modules, such as {adapter.unmatched[0]}"
            self._note(MergeCause.KEYS, "; ".join(filter(None, [text, adapter.renaming])), adapter.unmatched)
        empty = [one.name for one in self._factors if one.is_zero]
        if empty and len(empty) == len(adapter.targets):
            text = f"a factor of each of its {len(empty)} layers is zero"
            self._note(MergeCause.EMPTY_ADAPTER, text, empty, "warning")
        nowhere = [name for name in adapter.targets if name not in self._base and name not in self._merged]
        if absent := [name for name in nowhere if not self._is_tied_head(name)]:
            self._note(MergeCause.KEYS, f"{counted(len(absent), 'tensor')}, such as {absent[0]}", absent)

    def _about_broken_adapter(self) -> None:
        """Name the adapter's tensors that are not finite, and how much of the folder cannot be judged for it."""
        texts = [f"{name}: {where}" for name, where in self._broken[:_MOST_BROKEN]]
        texts += filter(None, [and_more(len(self._broken) - _MOST_BROKEN, "tensor")])
        unjudged = [one.name for one in self.found.tensors if MergeCause.ADAPTER_NOT_FINITE in one.causes]
        if unjudged:
            adapted = [one for one in self.found.tensors if one.role in ("adapted", "saved")]
            texts.append(f"{len(unjudged)} of {counted(len(adapted), 'adapted tensor')} cannot be judged for it")
        self._note(MergeCause.ADAPTER_NOT_FINITE, "; ".join(texts), unjudged)

    def _is_tied_head(self, name: str) -> bool:
        """Report whether a tensor that the adapter has whole is a head that is tied to an embedding, saved twice."""
        targets = self._adapter.targets
        own, ties = targets[name], self._before.ties or self._after.ties
        return (
            ties
            and _names_head(name)
            and isinstance(own, Replaced)
            and any(
                isinstance(one, Replaced) and other != name and one.value.equal(own.value)
                for other, one in targets.items()
            )
        )

    def _extra(self, name: str, stored: Stored) -> None:
        """Judge a tensor that the base does not have on disk: the adapter does, it is a head that is tied, or extra."""
        target = self._adapter.targets.get(name)
        twin = next((one for one, other in self._base.items() if "emb" in one and other.shape == stored.shape), None)
        if isinstance(target, Replaced):
            state = _state(name, stored, target)
            self._replaced(state, stored.read(), target, None)
        elif self._before.ties and twin is not None and _names_head(name):
            other = self._merged.get(twin)
            if self._after.ties and (other is None or not torch.equal(stored.read(), other.read())):
                text = f"the folder holds {name} and {twin}, which differ; loading takes one of them"
                self._note(MergeCause.TIED, text, [name, twin])
                return
            state = self._judge(name, self._base[twin], stored, self._adapter.targets.get(twin))
        else:
            state = _state(name, stored, None)
            state.role, state.status, state.reason = "extra", "unexpected", "neither base nor adapter has it"
            if any(part in f".{name}" for part in _LEFTOVER):
                text = f"{name} is a name of PEFT's own layers: the model was saved before the merge"
                self._note(MergeCause.FILES, text, [name])
        self.found.tensors.append(state)

    def _judge(self, name: str, base: Stored, here: Stored, target: Target | None) -> TensorState:
        state = _state(name, here, target)
        if target is not None and not is_target_finite(target):
            state.wrong(state.elements)
            state.causes = {MergeCause.ADAPTER_NOT_FINITE: ""}
            return state
        if here.step is not None or here.dtype not in UNIT_ROUNDOFF or base.dtype not in UNIT_ROUNDOFF:
            self._quantized(state, base, here, target)
        elif isinstance(target, Replaced):
            self._replaced(state, here.read(), target, base.read())
        elif here.shape != base.shape:
            self._resized(state, base, here, target)
        else:
            given = self._adapter.bases.get(name)
            actual, before = here.read(), base.read() if given is None else given
            self._unquantized(state, actual, before, target)
            unexplained = state.status == "outside" and not state.causes and state.elements <= _MOST_QUANTIZED
            if unexplained and base.step is not None and isinstance(target, LowRankTarget | None):
                values = actual.double() - _delta(target, before.shape)
                if bool(((values - before.double()).abs() <= base.step(values)).all()):
                    state.causes = {MergeCause.SIXTEEN_BIT_BASE: ""}
        if state.status == "outside" and name in self._adapter.shared:
            text = f"{self._adapter.shared[name]} adapted modules share {name}, which cannot hold the results of all"
            state.causes = {MergeCause.TIED: text}
        return state

    def _unquantized(
        self, state: TensorState, actual: torch.Tensor, before: torch.Tensor, target: Target | None
    ) -> None:
        made = non_finite_elements(actual, before, target)
        if target is None:
            self._untouched(state, _without(made, actual, before), before)
        elif isinstance(target, LowRankTarget):
            self._low_rank(state, actual, before, target)
        elif not isinstance(target, Replaced):
            self._by_method(state, actual, before, target)
            if made is not None:  # whether anything else is wrong its measure does not tell
                state.status = "within"
        if made is not None:
            self._mark_non_finite(state, made)

    def _mark_non_finite(self, state: TensorState, made: NonFiniteElements) -> None:
        """Say what the merge made NaN or infinite, beside what else is wrong with the tensor."""
        if self._alone or state.status == "outside":
            self._note(MergeCause.OVERFLOW, f"{state.name}: {made.text}", [state.name])
            state.wrong(state.outside + made.count, state.reason)
        else:
            state.wrong(made.count)
            state.causes = {MergeCause.OVERFLOW: made.text}
        if state.worst is None:
            state.worst = (made.index, made.actual, made.exact, made.exact)

    def _by_method(
        self, state: TensorState, actual: torch.Tensor, before: torch.Tensor, target: ByForm | ByPeft
    ) -> None:
        if self._adapter.drawn is not None:
            state.status, state.reason = "skipped", "no two loads of the adapter merge to the same"
            return
        found = judge_by_method(actual, before, target)
        if found is None:
            state.status, state.reason = "skipped", "PEFT does not merge it by itself, and it has no closed form"
            return
        measure, ratio, text = found
        if ratio <= 1:
            return
        state.wrong(max(1, int(measure.mismatched)), f"by a merge in {text}")
        if measure.worst_index is not None:
            exact, allowed = float(measure.worst_expected or 0.0), float(measure.allowed or 0.0)
            state.worst = (measure.worst_index, float(measure.worst_actual or 0.0), exact - allowed, exact + allowed)
        if torch.equal(actual, before.to(actual.dtype)):
            state.causes = {MergeCause.NOT_MERGED: ""}
        elif target.plain is not None:
            plain = self._question(actual, before, target.plain)
            if plain.holds(target.plain.left, target.plain.right, target.plain.scaling):
                state.causes = {MergeCause.MAGNITUDE if isinstance(target, ByForm) else MergeCause.RESIDUAL_BASE: ""}

    def _question(self, actual: torch.Tensor, before: torch.Tensor, target: LowRankTarget) -> MergeQuestion:
        return MergeQuestion(
            actual=actual.reshape(target.shape),
            base=before.reshape(target.shape),
            target=target,
            writer=self._writer,
            others=sorted({one.scaling for one in self._factors} - {target.scaling}),
            layers=[one for one in self._factors if one.shape == target.shape and one.name != target.name],
            briefly=self._in_vain >= _MOST_IN_VAIN,
        )

    def _low_rank(self, state: TensorState, actual: torch.Tensor, before: torch.Tensor, target: LowRankTarget) -> None:
        if (half := half_of(actual)) is not None and not torch.equal(actual, before.to(actual.dtype)):
            actual, self._through[state.name] = actual.to(half), name_of(half)
        question = self._question(actual, before, target)
        wrong: list[tuple[int, OutsideElements]] = []
        effect, used = Effect(), Counter[Order]()
        for number, (one, of) in enumerate(question.sums(target.left, target.right, target.scaling)):
            judged = self._writer.judge(one, of)
            if judged.outside:
                wrong.append((number, judged))
            else:
                effect.add(one, of)
                used[judged.order] += 1
        with self._counting:
            self.found.effect.include(effect)
            self.found.orders.update(used)
        if not wrong:
            return
        each = question.base[0].numel()
        state.wrong(sum(max(1, round(judged.share * each)) for _, judged in wrong))
        number, worst = max(wrong, key=lambda one: one[1].outside)
        if worst.worst is not None:
            row, column, *values = worst.worst
            index = {1: (row,), 2: (row, column)}.get(actual.dim(), (number, row, column))
            state.worst = (index, values[0], values[1], values[2])
        state.causes = explain(question)
        self._in_vain += not state.causes

    def _untouched(self, state: TensorState, actual: torch.Tensor, before: torch.Tensor) -> None:
        state.status = "equal" if actual.dtype == before.dtype else "within"
        if self._is_cast_of(state, actual, before):
            return
        wanted = before.to(actual.dtype)
        differ = (actual != wanted) & ~(actual.isnan() & wanted.isnan())
        if not differ.any():
            state.status = "equal"  # zeros of another sign
            return
        state.wrong(int(differ.sum()))
        if self._alone:
            state.difference = difference(actual, before)
            state.reason = state.difference.text
        else:
            index = tuple(int(one) for one in differ.nonzero()[0])
            state.worst = (index, float(actual[index]), float(wanted[index]), float(wanted[index]))

    def _replaced(
        self, state: TensorState, actual: torch.Tensor, target: Replaced, before: torch.Tensor | None
    ) -> None:
        state.role, state.status, value = "saved", "equal", target.value
        if target.rows is not None:
            assert before is not None
            value = before.to(value.dtype).index_copy(0, target.rows, value)
        made = non_finite_elements(actual, None, replace(target, value=value, rows=None))
        if not self._is_cast_of(state, _without(made, actual, value), value):
            state.wrong(actual.numel(), f"the adapter's file has it whole, {tuple(value.shape)}")
            if before is not None and _way_of_cast(actual, before) is not None:
                state.causes = {MergeCause.SAVED_DROPPED: ""}
        if made is not None:
            self._mark_non_finite(state, made)

    def _is_cast_of(self, state: TensorState, actual: torch.Tensor, value: torch.Tensor) -> bool:
        """Report whether a tensor holds a value in its own dtype; one that went by way of a half type is noted."""
        way = _way_of_cast(actual, value)
        if way:
            state.status, self._through[state.name] = "within", way
        return way is not None

    def _resized(self, state: TensorState, base: Stored, here: Stored, target: Target | None) -> None:
        """Judge the first rows of a tensor that has more, or fewer, than the base's."""
        rows = min(base.shape[0], here.shape[0]) if base.shape and here.shape else 0
        if rows == 0 or base.shape[1:] != here.shape[1:]:
            state.wrong(state.elements, f"shape {list(here.shape)}, the base has {list(base.shape)}")
            return
        short = replace(target, left=target.left[:, :rows]) if isinstance(target, LowRankTarget) else target
        self._unquantized(state, here.read()[:rows], base.read()[:rows], short)
        right = "are right" if state.status in ("equal", "within") else "are wrong"
        text = f"{state.name} has {here.shape[0]} rows, the base {base.shape[0]}: the first {rows} {right}"
        self._note(MergeCause.RESIZED, text, [state.name], "warning")

    def _quantized(self, state: TensorState, base: Stored, here: Stored, target: Target | None) -> None:
        """Judge a tensor that is quantized in the folder: by half a step around its exact value."""
        if here.step is None or not isinstance(target, LowRankTarget | None) or state.elements > _MOST_QUANTIZED:
            if target is None and here.shape == base.shape and here.dtype == base.dtype:
                self._untouched(state, here.read(), base.read())
            else:
                unread = self._after.unread.get(state.name) or self._before.unread.get(state.name)
                state.status, state.reason = "skipped", unread or f"{state.dtype} is not judged here"
            return
        actual, before = here.read().double(), base.read()
        delta = _delta(target, before.shape)
        exact = before.double() + delta
        # the writer may have rounded sum and delta before it quantized
        unit = max(UNIT_ROUNDOFF.get(one, 0.0) for one in (torch.float16, before.dtype))
        before = before.double()
        allowed = here.step(exact) + 2 * unit * (before.abs() + delta.abs())
        wrong = ~((actual - exact).abs() <= allowed)
        square = float(delta.square().sum())
        if square and base.step is not None:
            # where the levels of the base are the nearest to most sums, quantizing takes the delta away again
            left = float(((actual - before) * delta).sum()) / square
            if left < _LEAST_LEFT:
                text = f"{state.name} has {max(left, 0.0):.0%} of its delta"
                self._note(MergeCause.QUANTIZED_AWAY, text, [state.name], "warning")
        if not wrong.any():
            return
        state.wrong(int(wrong.sum()))
        index = tuple(int(one) for one in wrong.nonzero()[0])
        middle, room = float(exact[index]), float(allowed[index])
        state.worst = (index, float(actual[index]), middle - room, middle + room)
        if bool(((actual - before).abs() <= here.step(before)).all()):
            state.causes = {MergeCause.NOT_MERGED: ""}
        elif here.codes is not None:
            meant = [exact] if base.codes is None else [exact, base.codes().double() + delta]
            if any(_near_codes(here.codes(), one) for one in meant):
                state.causes = {MergeCause.CODES: ""}

    def _summed_up(self) -> None:
        """Explain by a whole what single tensors do not show: another base, experts or a tower left out."""
        adapted, untouched = self.found.of("adapted"), self.found.of("untouched")
        wrong, changed = ([one for one in of if one.status == "outside"] for of in (adapted, untouched))
        same = [one for one in untouched if one.status in ("equal", "within")]
        if not self._alone and _matrices(changed) > _matrices(same):
            for one in [*changed, *(one for one in wrong if not one.causes)]:
                one.causes = {MergeCause.OTHER_BASE: ""}
        if self._broken:
            self._about_broken_adapter()
        if through := sorted(self._through):
            text = (
                f"{counted(len(through), 'tensor')}, such as {through[0]}, rounded through {self._through[through[0]]}"
            )
            self._note(MergeCause.LOSS, text, through, "warning")
        _name_exchanged_layers(wrong)
        alone = [one for one in wrong if set(one.causes) == {MergeCause.NOT_MERGED}]
        right = [one.name for one in adapted if one not in alone]
        if not alone or not right:
            return
        part = ""
        if all(".experts." in one.name for one in alone) and not any(".experts." in name for name in right):
            cause = MergeCause.EXPERTS_LEFT_OUT
        elif part := _tower([one.name for one in alone], right):
            cause = MergeCause.TOWER_LEFT_OUT
        else:
            return
        for one in alone:
            one.causes = {cause: part}


def _name_exchanged_layers(wrong: list[TensorState]) -> None:
    """Say of each tensor with another layer's delta whose it is, or that two have each other's.

    The explanation holds the other layer's name until then. Both tensors of a pair get the same text, so that a report
    says it once.
    """
    holds = {split_name(state.name): state.causes.get(MergeCause.OTHER_LAYER, "") for state in wrong}
    order = [layer for layer, _ in holds]
    for state in wrong:
        layer, tensor = split_name(state.name)
        other = holds[layer, tensor]
        if not other:
            continue
        if holds.get((other, tensor)) == layer:
            first, second = sorted((layer, other), key=order.index)
            text = f"{first} and {second} have each other's"
        else:
            text = f"{layer} has that of {other}"
        state.causes[MergeCause.OTHER_LAYER] = text


def _without(made: NonFiniteElements | None, actual: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the right values in the place of those that the merge made NaN or infinite."""
    if made is None or actual.shape != value.shape:
        return actual
    return torch.where(made.places, value.to(actual.dtype), actual)


def _matrices(states: list[TensorState]) -> int:
    return sum(len(one.shape) > 1 for one in states)


def _delta(target: LowRankTarget | None, shape: torch.Size) -> torch.Tensor:
    """Return what a target adds, float64."""
    if target is None:
        return torch.zeros(shape, dtype=torch.float64)
    return (target.left.double() @ target.right.double()).mul_(target.scaling).reshape(shape)


def _near_codes(codes: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Report whether codes are the nearest numbers of their dtype to these values, but for some that are cut."""
    step = torch.finfo(codes.dtype).eps * wanted.abs().clamp(min=float(torch.finfo(codes.dtype).smallest_normal))
    return float((~((codes.double() - wanted).abs() <= step)).double().mean()) < 0.01


def _names_head(name: str) -> bool:
    return name.split(".")[-2:-1] in (["lm_head"], ["output"], ["decoder"], ["embed_out"])


def _tower(alone: list[str], right: list[str]) -> str:
    """Return the beginning that all of some names share, and none of others; empty where that is no whole part."""
    parts = [name.split(".") for name in alone]
    shared = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1 or column[0].isdigit() or column[0] == "layers":
            break
        shared.append(column[0])
        beginning = ".".join(shared) + "."
        if not any(name.startswith(beginning) for name in right):
            return beginning.rstrip(".")
    return ""


def _way_of_cast(actual: torch.Tensor, base: torch.Tensor) -> str | None:
    """Return by way of which half type a tensor is another one cast to its dtype: empty of none, None if it is not."""
    if actual.shape == base.shape:
        for half in (None, *(one for one in HALF_TYPES if one not in (actual.dtype, base.dtype))):
            if same_bits(actual, (base if half is None else base.to(half)).to(actual.dtype)):
                return "" if half is None else name_of(half)
    return None


def _state(name: str, stored: Stored, target: Target | None) -> TensorState:
    return TensorState(
        name=name,
        role="untouched" if target is None else "adapted",
        status="within",
        shape=stored.shape,
        dtype=name_of(stored.dtype),
        elements=math.prod(stored.shape),
        keys=stored.keys if stored.keys != (name,) else (),
        is_delta_zero=isinstance(target, LowRankTarget) and target.is_zero,
    )


def _most(tensors: Iterable[Stored]) -> str:
    counts = Counter(name_of(one.dtype) for one in tensors if len(one.shape) > 1)
    return counts.most_common(1)[0][0] if counts else ""
