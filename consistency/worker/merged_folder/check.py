"""Check a merged folder: every tensor of base and folder against what the adapter makes of it."""

from __future__ import annotations

import concurrent.futures
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from consistency.capture.merge_causes import MergeCause
from consistency.case.case import Case
from consistency.devices.cores import available_cores
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.worker.merged_folder import by_method, names
from consistency.worker.merged_folder.adapter import (
    Adapter,
    ByForm,
    LowRankTarget,
    Replaced,
    Target,
    on_model,
    open_adapter,
)
from consistency.worker.merged_folder.difference import Difference, difference
from consistency.worker.merged_folder.explain import Explanations, MergeQuestion, explain
from consistency.worker.merged_folder.folder import Folder, Problem, Stored
from consistency.worker.merged_folder.formats import open_weights
from consistency.worker.merged_folder.orders import Effect, LowRankSum, MergeWriter, Order, OutsideElements, same_bits

Status = Literal["equal", "within", "outside", "missing", "unexpected", "skipped"]

_MOST_QUANTIZED = 1 << 27
"""Elements of the largest quantized tensor that is judged, which takes some arrays of it in float64."""

_MOST_IN_VAIN = 8
"""Tensors of which no mistake is found, until all others are only looked at for those that are quick to try."""

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
    """

    name: str
    role: str
    status: Status
    shape: tuple[int, ...] = ()
    dtype: str = ""
    elements: int = 0
    outside: int = 0
    worst: tuple[tuple[int, ...], float, float, float] | None = None
    causes: Explanations = field(default_factory=dict)
    reason: str = ""
    keys: tuple[str, ...] = ()
    difference: Difference | None = None


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
    """

    tensors: list[TensorState] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    mapping: list[str] = field(default_factory=list)
    orders: Counter[Order] = field(default_factory=Counter)
    effect: Effect = field(default_factory=Effect)
    dtype: str = ""
    unread: dict[str, str] = field(default_factory=dict)

    def of(self, role: str) -> list[TensorState]:
        return [one for one in self.tensors if one.role == role]


def check(
    base: Path, adapter: Path | None, merged: Path, *, allow_pickle: bool = False, trust_remote_code: bool = False
) -> MergedFolder:
    """Check whether a folder holds base + adapter.

    Parameters
    ----------
    base, adapter, merged : Path
        Folders; `merged` may be one file. Without an adapter it is told what differs from the base.

    Raises
    ------
    InputError
        One of them cannot be read.
    """
    case = Case(
        name="",
        base=str(base),
        adapter=None if adapter is None else str(adapter),
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    before = open_weights(base, allow_pickle=allow_pickle)
    after = open_weights(merged, allow_pickle=allow_pickle, like=before)
    walk = _Walk(case, before, after)
    walk.check()
    return walk.found


class _Walk:
    """The tensors of two folders, by the same names."""

    def __init__(self, case: Case, before: Folder, after: Folder) -> None:
        self._before, self._after = before, after
        self.found = MergedFolder(problems=list(after.problems), unread=dict(after.unread))
        self._writer, self._counting = MergeWriter(), threading.Lock()
        self._in_vain = 0
        self._base, self._merged = before.tensors, after.tensors
        given = Adapter() if case.adapter is None else None
        if case.adapter is not None:
            given = open_adapter(Path(case.adapter), self._base, allow_pickle=case.allow_pickle)
        merged, how = names.renamed(self._merged, self._base)
        wanted = self._base if given is None or case.adapter is None else given.targets
        foreign = [name for name in merged if name not in self._base]
        if given is None or (foreign and any(name not in merged for name in wanted)):
            given = self._on_model(case, given)
            merged, how = names.renamed(self._merged, self._base)
        self._merged, self._adapter, self._alone = merged, given, case.adapter is None
        self.found.mapping += how
        self.found.dtype = _most(self._merged.values())
        scalings = {one.scaling for one in given.targets.values() if isinstance(one, LowRankTarget)}
        self._scalings = tuple(sorted(scalings))

    def _on_model(self, case: Case, by_names: Adapter | None) -> Adapter:
        """Bring base, folder and adapter to the names of transformers' model."""
        model = names.model_of(case)
        if model is not None:
            self._base, self._merged = (names.in_model(one, model) for one in (self._before, self._after))
            self.found.mapping.append(f"by transformers' names of {type(model).__name__}")
        if by_names is not None and (case.adapter is None or model is None):
            return by_names
        return on_model(case, model, self._base, _most(self._merged.values()))

    def check(self) -> None:
        """Judge every tensor; several at a time where torch's operations leave cores free."""
        self._about_adapter()
        with concurrent.futures.ThreadPoolExecutor(max(1, available_cores() // torch.get_num_threads())) as pool:
            states = list(pool.map(self._one, self._base.items()))
        self.found.tensors += [state for state in states if state is not None]
        for name in [one for one in self._merged if one not in self._base]:
            self._extra(name, self._merged[name])
        self._summed_up()

    def _one(self, item: tuple[str, Stored]) -> TensorState | None:
        """Return what is in the place of a tensor of the base; None where it need not be there."""
        name, stored = item
        target, here = self._adapter.targets.get(name), self._merged.get(name)
        if here is None:
            return self._missing(name, stored, target)
        state = self._state(name, stored, here, target)
        if state.status == "outside" and name in self._adapter.shared:
            text = f"{self._adapter.shared[name]} adapted modules share {name}, which cannot hold the results of all"
            state.causes = {MergeCause.TIED: text}
        return state

    def _about_adapter(self) -> None:
        adapter = self._adapter
        if adapter.unmatched:
            some = f"{len(adapter.unmatched)} modules, such as {adapter.unmatched[0]}"
            text = f"{some}{'; ' if adapter.renaming else ''}{adapter.renaming}"
            self.found.problems.append(Problem(cause=MergeCause.KEYS, text=text, tensors=adapter.unmatched))
        factors = [one for one in adapter.targets.values() if isinstance(one, LowRankTarget)]
        empty = [one.name for one in factors if one.is_zero]
        if factors and len(empty) == len(adapter.targets):
            text = f"a factor of each of its {len(empty)} layers is zero"
            self.found.problems.append(
                Problem(cause=MergeCause.EMPTY_ADAPTER, text=text, tensors=tuple(empty), severity="warning")
            )
        absent = [name for name in adapter.targets if name not in self._base and name not in self._merged]
        if absent:
            text = f"{len(absent)} tensors, such as {absent[0]}"
            self.found.problems.append(Problem(cause=MergeCause.KEYS, text=text, tensors=tuple(absent)))

    def _missing(self, name: str, stored: Stored, target: Target | None) -> TensorState | None:
        tied = self._before.ties or self._after.ties
        if tied and _names_head(name):
            return None
        role = "untouched" if target is None else "adapted"
        reason = self.found.unread.get(name, "")
        state = _state(name, role, "skipped" if reason else "missing", stored)
        state.reason = reason or "the folder does not have it"
        return state

    def _extra(self, name: str, stored: Stored) -> None:
        target = self._adapter.targets.get(name)
        if isinstance(target, Replaced):
            self.found.tensors.append(self._replaced(name, None, stored, target))
            return
        if self._is_head(name, stored):
            return
        state = _state(name, "extra", "unexpected", stored)
        state.reason = "neither base nor adapter has it"
        self.found.tensors.append(state)
        if any(part in f".{name}" for part in _LEFTOVER):
            text = f"{name} is a name of PEFT's own layers: the model was saved before the merge"
            self.found.problems.append(Problem(cause=MergeCause.FILES, text=text, tensors=(name,)))

    def _is_head(self, name: str, stored: Stored) -> bool:
        """Judge a head that the base does not have on disk, because it is its embedding."""
        twin = next((one for one, other in self._base.items() if "emb" in one and other.shape == stored.shape), None)
        if not self._before.ties or twin is None or not _names_head(name):
            return False
        other = self._merged.get(twin)
        same = other is not None and torch.equal(stored.read(), other.read())
        if not same and self._after.ties:
            text = f"the folder holds {name} and {twin}, which differ; loading takes one of them"
            self.found.problems.append(Problem(cause=MergeCause.TIED, text=text, tensors=(name, twin)))
            return True
        self.found.tensors.append(self._state(name, self._base[twin], stored, self._adapter.targets.get(twin)))
        return True

    def _state(self, name: str, base: Stored, here: Stored, target: Target | None) -> TensorState:
        if here.step is not None or here.dtype not in UNIT_ROUNDOFF or base.dtype not in UNIT_ROUNDOFF:
            return self._quantized(name, base, here, target)
        if isinstance(target, Replaced):
            return self._replaced(name, base, here, target)
        if here.shape != base.shape:
            return self._resized(name, base, here, target)
        actual, before = here.read(), self._before_merge(name, base)
        state = self._judged(name, here, actual, before, target)
        unexplained = state.status == "outside" and not state.causes and state.elements <= _MOST_QUANTIZED
        if unexplained and base.step is not None and (target is None or isinstance(target, LowRankTarget)):
            values = actual.double() - _delta(target, before.shape)
            if bool(((values - before.double()).abs() <= base.step(values)).all()):
                state.causes = {MergeCause.SIXTEEN_BIT_BASE: ""}
        return state

    def _before_merge(self, name: str, base: Stored) -> torch.Tensor:
        given = self._adapter.bases.get(name)
        return base.read() if given is None else given

    def _judged(
        self, name: str, here: Stored, actual: torch.Tensor, before: torch.Tensor, target: Target | None
    ) -> TensorState:
        if target is None:
            return self._untouched(name, here, actual, before)
        if isinstance(target, LowRankTarget):
            return self._low_rank(name, here, actual, before, target)
        assert not isinstance(target, Replaced)  # which `_state` has judged
        state = _state(name, "adapted", "within", here)
        found = by_method.judge_by_method(actual, before, target)
        if found is None:
            state.status, state.reason = "skipped", "PEFT does not merge it by itself, and it has no closed form"
            return state
        measure, ratio, text = found
        if ratio <= 1:
            return state
        state.status, state.outside = "outside", max(1, int(measure.mismatched))
        if measure.worst_index is not None:
            exact, allowed = float(measure.worst_expected or 0.0), float(measure.allowed or 0.0)
            state.worst = (measure.worst_index, float(measure.worst_actual or 0.0), exact - allowed, exact + allowed)
        state.reason = f"by a merge in {text}"
        if torch.equal(actual, before.to(actual.dtype)):
            state.causes = {MergeCause.NOT_MERGED: ""}
        elif target.plain is not None:
            plain = self._question(actual, before, target.plain)
            if plain.holds(target.plain.left, target.plain.right, target.plain.scaling):
                state.causes = {MergeCause.MAGNITUDE if isinstance(target, ByForm) else MergeCause.RESIDUAL_BASE: ""}
        return state

    def _question(self, actual: torch.Tensor, before: torch.Tensor, target: LowRankTarget) -> MergeQuestion:
        shape = (target.left.shape[0], target.left.shape[1], target.right.shape[2])
        others = tuple(one for one in self._scalings if one != target.scaling)
        return MergeQuestion(
            actual=actual.reshape(shape), base=before.reshape(shape), target=target, writer=self._writer, others=others,
            briefly=self._in_vain >= _MOST_IN_VAIN,
        )  # fmt: skip

    def _low_rank(
        self, name: str, here: Stored, actual: torch.Tensor, before: torch.Tensor, target: LowRankTarget
    ) -> TensorState:
        state = _state(name, "adapted", "within", here)
        question = self._question(actual, before, target)
        wrong: list[tuple[int, OutsideElements]] = []
        effect, used = Effect(), Counter[Order]()
        for number, (one, weight, left, right) in enumerate(
            zip(question.actual, question.base, target.left, target.right, strict=True)
        ):
            of = LowRankSum(weight, left, right, target.scaling)
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
            return state
        each = question.base[0].numel()
        state.status, state.outside = "outside", sum(max(1, round(judged.share * each)) for _, judged in wrong)
        number, worst = max(wrong, key=lambda one: one[1].outside)
        if worst.worst is not None:
            row, column, *values = worst.worst
            index = {1: (row,), 2: (row, column)}.get(actual.dim(), (number, row, column))
            state.worst = (index, values[0], values[1], values[2])
        state.causes = explain(question)
        self._in_vain += not state.causes
        return state

    def _untouched(self, name: str, here: Stored, actual: torch.Tensor, before: torch.Tensor) -> TensorState:
        state = _state(name, "untouched", "equal", here)
        for one in by_method.untouched(actual, before):
            if same_bits(actual, one):
                state.status = "equal" if actual.dtype == before.dtype else "within"
                return state
        wanted = before.to(actual.dtype)
        differ = (actual != wanted) & ~(actual.isnan() & wanted.isnan())
        state.status, state.outside = "outside", int(differ.sum())
        if state.outside and self._alone:
            state.difference = difference(actual, before)
            state.reason = state.difference.text
        elif state.outside:
            index = tuple(int(one) for one in differ.nonzero()[0])
            state.worst = (index, float(actual[index]), float(wanted[index]), float(wanted[index]))
        else:
            state.status = "equal"  # zeros of another sign
        return state

    def _replaced(self, name: str, base: Stored | None, here: Stored, target: Replaced) -> TensorState:
        state = _state(name, "saved", "equal", here)
        actual, value = here.read(), target.value
        if target.rows is not None:
            assert base is not None
            value = base.read().to(value.dtype).index_copy(0, target.rows, target.value)
        if actual.shape == value.shape and any(same_bits(actual, one) for one in by_method.untouched(actual, value)):
            return state
        state.status, state.outside = "outside", actual.numel()
        state.reason = f"the adapter's file has it whole, {tuple(value.shape)}"
        if base is not None and any(same_bits(actual, one) for one in by_method.untouched(actual, base.read())):
            state.causes = {MergeCause.SAVED_DROPPED: ""}
        return state

    def _resized(self, name: str, base: Stored, here: Stored, target: Target | None) -> TensorState:
        """Judge the first rows of a tensor that has more, or fewer, than the base's."""
        rows = min(base.shape[0], here.shape[0]) if base.shape and here.shape else 0
        if rows == 0 or base.shape[1:] != here.shape[1:]:
            state = _state(name, "untouched" if target is None else "adapted", "outside", here)
            state.reason, state.outside = f"shape {list(here.shape)}, the base has {list(base.shape)}", state.elements
            return state
        short = target
        if isinstance(target, LowRankTarget):
            short = replace(target, left=target.left[:, :rows])
        state = self._judged(name, here, here.read()[:rows], base.read()[:rows], short)
        right = "are right" if state.status in ("equal", "within") else "are wrong"
        text = f"{name} has {here.shape[0]} rows, the base {base.shape[0]}: the first {rows} {right}"
        self.found.problems.append(Problem(cause=MergeCause.RESIZED, text=text, tensors=(name,), severity="warning"))
        return state

    def _quantized(self, name: str, base: Stored, here: Stored, target: Target | None) -> TensorState:
        """Judge a tensor that is quantized in the folder: by half a step around its exact value."""
        state = _state(name, "untouched" if target is None else "adapted", "within", here)
        if here.step is None or not isinstance(target, LowRankTarget | None) or state.elements > _MOST_QUANTIZED:
            if target is None and here.shape == base.shape and here.dtype == base.dtype:
                return self._untouched(name, here, here.read(), base.read())
            state.status, state.reason = "skipped", self.found.unread.get(name, f"{here.dtype} is not judged here")
            return state
        actual, before = here.read(), base.read()
        delta = _delta(target, before.shape)
        exact = before.double() + delta
        # the writer may have rounded sum and delta before it quantized
        unit = max(UNIT_ROUNDOFF.get(one, 0.0) for one in (torch.float16, before.dtype))
        error = (actual.double() - exact).abs()
        allowed = here.step(exact) + 2 * unit * (before.double().abs() + delta.abs())
        wrong = ~(error <= allowed)
        if target is not None:
            self._survival(name, actual, before, delta, already=base.step is not None)
        if not bool(wrong.any()):
            return state
        state.status, state.outside = "outside", int(wrong.sum())
        index = tuple(int(one) for one in wrong.nonzero()[0])
        middle, room = float(exact[index]), float(allowed[index])
        state.worst = (index, float(actual[index]), middle - room, middle + room)
        if bool(((actual.double() - before.double()).abs() <= here.step(before.double())).all()):
            state.causes = {MergeCause.NOT_MERGED: ""}
        elif here.codes is not None:
            codes = here.codes()
            if _near_codes(codes, exact) or (
                base.codes is not None and _near_codes(codes, base.codes().double() + delta)
            ):
                state.causes = {MergeCause.CODES: ""}
        return state

    def _survival(
        self, name: str, actual: torch.Tensor, before: torch.Tensor, delta: torch.Tensor, *, already: bool
    ) -> None:
        """Note that quantizing took the delta away again: the levels of the base are the nearest to most sums."""
        square = float(delta.square().sum())
        left = float(((actual.double() - before.double()) * delta).sum()) / square if square else 1.0
        if already and left < _LEAST_LEFT:
            text = f"{name} has {max(left, 0.0):.0%} of its delta"
            self.found.problems.append(
                Problem(cause=MergeCause.QUANTIZED_AWAY, text=text, tensors=(name,), severity="warning")
            )

    def _summed_up(self) -> None:
        """Explain by a whole what single tensors do not show: another base, experts or a tower left out."""
        untouched = [one for one in self.found.of("untouched") if one.status in ("equal", "within", "outside")]
        changed = [one for one in untouched if one.status == "outside"]
        matrices = [one for one in untouched if len(one.shape) > 1]
        adapted = self.found.of("adapted")
        wrong = [one for one in adapted if one.status == "outside"]
        if (
            not self._alone
            and changed
            and len([one for one in matrices if one.status == "outside"]) > len(matrices) / 2
        ):
            for one in [*changed, *(one for one in wrong if not one.causes)]:
                one.causes = {MergeCause.OTHER_BASE: ""}
        alone = [one for one in wrong if set(one.causes) == {MergeCause.NOT_MERGED}]
        if alone and len(alone) < len(adapted):
            right = [one.name for one in adapted if one not in alone]
            if all(".experts." in one.name for one in alone) and not any(".experts." in name for name in right):
                _call(alone, MergeCause.EXPERTS_LEFT_OUT)
            elif part := _tower([one.name for one in alone], right):
                _call(alone, MergeCause.TOWER_LEFT_OUT, part)


def _delta(target: LowRankTarget | None, shape: torch.Size) -> torch.Tensor:
    """Return what a target adds, float64."""
    if target is None:
        return torch.zeros(shape, dtype=torch.float64)
    return (target.left.double() @ target.right.double()).mul_(target.scaling).reshape(shape)


def _near_codes(codes: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Report whether codes are the nearest numbers of their dtype to these values, but for some that are cut."""
    step = torch.finfo(codes.dtype).eps * wanted.abs().clamp(min=float(torch.finfo(codes.dtype).smallest_normal))
    return float(((codes.double() - wanted).abs() > step).double().mean()) < 0.01


def _names_head(name: str) -> bool:
    return name.split(".")[-2:-1] in (["lm_head"], ["output"], ["decoder"], ["embed_out"])


def _call(states: list[TensorState], cause: MergeCause, text: str = "") -> None:
    for one in states:
        one.causes = {cause: text}


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


def _state(name: str, role: str, status: Status, stored: Stored) -> TensorState:
    elements = 1
    for size in stored.shape:
        elements *= size
    return TensorState(
        name=name, role=role, status=status, shape=stored.shape, dtype=name_of(stored.dtype), elements=elements,
        keys=stored.keys if stored.keys != (name,) else (),
    )  # fmt: skip


def _most(tensors: Iterable[Stored]) -> str:
    counts = Counter(name_of(one.dtype) for one in tensors if len(one.shape) > 1)
    return counts.most_common(1)[0][0] if counts else ""
