"""Check a merged folder: pair its tensors with those of the base and the adapter, judge each, and sum up."""

from __future__ import annotations

import concurrent.futures
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from consistency.capture.names import split_name
from consistency.capture.wording import and_more, counted, some
from consistency.case import recognition
from consistency.case.case import Case
from consistency.case.checkpoint import read_json
from consistency.devices.cores import available_cores
from consistency.errors import InputError
from consistency.extras.merging.check_merged import names
from consistency.extras.merging.check_merged.accused import (
    explain_by_backbone,
    explain_changed,
    leave_out_untargeted,
    name_exchanged_folders,
)
from consistency.extras.merging.check_merged.adapter import Adapter, LowRankTarget, Replaced, on_model, open_adapter
from consistency.extras.merging.check_merged.beside import settings_findings
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.folder import Folder, Problem, Stored
from consistency.extras.merging.check_merged.formats import open_weights
from consistency.extras.merging.check_merged.judge import TensorJudge
from consistency.extras.merging.check_merged.loads import loading_problems
from consistency.extras.merging.check_merged.non_finite import broken_tensors
from consistency.extras.merging.check_merged.state import MergedFolder, TensorState
from consistency.extras.merging.check_merged.summed import add_up
from consistency.numerics.dtype import name_of
from consistency.worker.model.saved_adapter.loaded import remarks_on
from consistency.worker.model.weight_files import WeightFiles

_MOST_BROKEN = 4
"""Tensors of the adapter that are not finite and are named."""

_LEFTOVER = (".lora_A", ".lora_B", ".base_layer", ".modules_to_save", ".lora_embedding_", "_orig_mod.")
"""Parts of names that are PEFT's own or torch.compile's, which no saved model should have."""

_HEADS = frozenset({"lm_head", "output", "decoder", "embed_out"})
"""Names of the module that makes logits, which may be tied to the embedding."""


def check(cases: Sequence[Case], merged: Path, weights: Sequence[float] = ()) -> MergedFolder:
    """Check whether a folder, or a file, holds the base + the adapters of some cases.

    Without an adapter it is told what differs from the base.

    Parameters
    ----------
    cases : sequence of Case
        One for each adapter, or one without an adapter, all of the same base.
    weights : sequence of float
        A factor for each adapter; empty for 1.

    Raises
    ------
    InputError
        One of them cannot be read, or the adapters have no sum.
    """
    case = cases[0]
    before = open_weights(Path(case.base), allow_pickle=case.allow_pickle)
    after = open_weights(merged, allow_pickle=case.allow_pickle, like=before)
    folder_check = _FolderCheck(cases, weights, before, after)
    folder_check.check()
    return folder_check.result


class _FolderCheck:
    """A check of one folder: base, adapters and folder by the same names."""

    def __init__(self, cases: Sequence[Case], weights: Sequence[float], before: Folder, after: Folder) -> None:
        self._cases, self._case, self._before, self._after = cases, cases[0], before, after
        self._model: Any = None  # transformers', without weights, where names had to be matched by it
        self.result = MergedFolder(problems=list(after.problems))
        self._broken: list[tuple[str, str]] = []  # tensors of the adapters' files that are not finite, and where
        self._configs: list[dict[str, Any]] = []
        self._leftover: list[str] = []  # names of PEFT's own layers in the folder
        self._base, self._merged = before.tensors, after.tensors
        self._compares_bases = self._case.adapter is None
        adapters = self._open_adapters()
        # First by names alone, which is quick; by transformers' model only where names are left over on both sides.
        merged, mapping = names.renamed(self._merged, self._known(adapters))
        expected = set(self._base)
        if not self._compares_bases:
            expected = {name for adapter in adapters if adapter is not None for name in adapter.targets}
        if None in adapters or (merged.keys() - self._base.keys() and expected - merged.keys()):
            adapters = [self._match_by_model(case, adapter) for case, adapter in zip(cases, adapters, strict=True)]
            merged, mapping = names.renamed(self._merged, self._known(adapters))
        self._merged = merged
        self.result.mapping += mapping
        self._adapter = self._added_up([adapter for adapter in adapters if adapter is not None], weights)
        if self._adapter.drawn is not None:
            self.result.remarks.append(self._adapter.drawn)
        self.result.dtype = _most_frequent_dtype(self._merged.values())
        self._judge = TensorJudge(
            adapter=self._adapter, before=before, after=after, result=self.result, compares_bases=self._compares_bases
        )

    def _open_adapters(self) -> list[Adapter | None]:
        """Return each adapter, None for one that takes a model; note what is broken in their files."""
        if self._compares_bases:
            return [Adapter()]
        adapters = []
        for case in self._cases:
            assert case.adapter is not None
            opened = open_adapter(Path(case.adapter), self._base, allow_pickle=case.allow_pickle)
            if opened is None:
                _refuse_model_of_diffusers(Path(case.base), case.adapter)
            adapters.append(opened)
            files = WeightFiles.of_adapter(case.adapter, allow_pickle=case.allow_pickle)
            self._broken += broken_tensors(files)
            config = read_json(Path(case.adapter) / "adapter_config.json")
            self._configs.append(config)
            self.result.remarks += remarks_on(((name, files.read(name)) for name in files.names()), config)
        return adapters

    def _known(self, adapters: Sequence[Adapter | None]) -> dict[str, Stored]:
        """Return the tensors of the base, and those that an adapter alone has, such as a head of its own."""
        known = dict(self._base)
        for adapter in adapters:
            for name, target in adapter.targets.items() if adapter is not None else ():
                if isinstance(target, Replaced) and target.rows is None and name not in known:
                    value = target.value
                    shape, read = tuple(value.shape), functools.partial(torch.clone, value)
                    known[name] = Stored(name=name, keys=(name,), shape=shape, dtype=value.dtype, read=read)
        return known

    def _added_up(self, adapters: Sequence[Adapter], weights: Sequence[float]) -> Adapter:
        """Return what all adapters do together."""
        if len(adapters) == 1 and not weights:
            return adapters[0]
        paths = [str(case.adapter) for case in self._cases]
        short = [Path(path).name for path in paths]
        labels = short if len(set(short)) == len(short) else paths
        if len(set(labels)) < len(labels):  # the same adapter, given twice
            labels = [f"{label} ({number})" for number, label in enumerate(labels, 1)]
        return add_up(dict(zip(labels, adapters, strict=True)), weights)

    def _match_by_model(self, case: Case, adapter: Adapter | None) -> Adapter:
        """Bring base, folder and adapter to the names of transformers' model; return the adapter."""
        model = names.model_of(case)  # a new one for each adapter: PEFT puts its layers into it
        if model is not None:
            self._base = names.in_model(self._before, model)
            self._merged = names.in_model(self._after, model)
            if self._model is None:
                self.result.mapping.append(f"by transformers' names of {type(model).__name__}")
        self._model = model
        if adapter is not None and (self._compares_bases or model is None):
            return adapter
        return on_model(case, model, self._base, _most_frequent_dtype(self._merged.values()))

    def check(self) -> None:
        """Judge every tensor; several at a time where torch's operations leave cores free."""
        self._check_adapter()
        with concurrent.futures.ThreadPoolExecutor(max(1, available_cores() // torch.get_num_threads())) as pool:
            states = list(pool.map(self._base_tensor_state, self._base.items()))
        self.result.tensors += self._but_for_another_head([state for state in states if state is not None])
        for name in [name for name in self._merged if name not in self._base]:
            self._add_extra_tensor(name, self._merged[name])
        self._sum_up()

    def _base_tensor_state(self, item: tuple[str, Stored]) -> TensorState | None:
        """Return the state of a tensor of the base in the folder; None where it need not be there."""
        name, stored = item
        target, merged = self._adapter.targets.get(name), self._merged.get(name)
        if merged is not None:
            return self._judge.judge(name, stored, merged, target)
        if (self._before.ties or self._after.ties) and _is_head(name):
            return None
        state = TensorState.of(name, stored, target)
        unread = self._after.unread.get(name, "")
        if unread:
            state.mark_skipped(unread)
        else:
            state.status, state.reason = "missing", "the folder does not have it"
        return state

    def _but_for_another_head(self, states: list[TensorState]) -> list[TensorState]:
        """Leave out what the folder lacks because the adapter is for another class than the base: its own head.

        A classifier that was trained on a base for text has no `lm_head`. The class is the adapter's, and the folder's
        config has to name it too: a folder that loads as the base's class needs all of the base.
        """
        absent = {state.name for state in states if state.status == "missing"}
        if self._compares_bases or not absent:
            return states
        model = self._model or names.model_of(self._case)
        if model is None:
            return states
        class_name = type(model).__name__
        if self._after.config.get("architectures", [class_name]) != [class_name]:
            return states
        left_out = absent & names.without_place(self._before, model)
        if left_out:
            text = f"the adapter is for {class_name}, which has no {some(sorted(left_out))}: the folder needs none"
            self.result.add_problem(MergeCause.OTHER_HEAD, text, (), "note")
        return [state for state in states if state.name not in left_out]

    def _check_adapter(self) -> None:
        """Add the problems of the adapter: modules that match nothing, factors of zeros, tensors without a place."""
        adapter = self._adapter
        if adapter.unmatched:
            text = f"{len(adapter.unmatched)} modules, such as {adapter.unmatched[0]}"
            if adapter.renaming:
                text = f"{text}; {adapter.renaming}"
            self.result.add_problem(MergeCause.KEYS, text, adapter.unmatched)
        empty = [target.name for target in self._judge.low_rank_targets if target.is_zero]
        if empty and len(empty) == len(adapter.targets):
            text = f"a factor of each of its {len(empty)} layers is zero"
            self.result.add_problem(MergeCause.EMPTY_ADAPTER, text, empty, "warning")
        without_place = [name for name in adapter.targets if name not in self._base and name not in self._merged]
        absent = [name for name in without_place if not self._is_tied_head(name)]
        if self._before.ties or self._after.ties:
            heads = [name for name in absent if _is_head(name)]
            absent = [name for name in absent if name not in heads]
            if heads:
                text = f"the adapter has {some(heads)} of its own, and the folder has not: loading takes the embedding"
                self.result.add_problem(MergeCause.TIED, text, heads)
        if absent:
            text = f"{counted(len(absent), 'tensor')}, such as {absent[0]}"
            self.result.add_problem(MergeCause.KEYS, text, absent)

    def _is_tied_head(self, name: str) -> bool:
        """Return whether a tensor that the adapter has whole is a head that is tied to an embedding, saved twice."""
        target = self._adapter.targets[name]
        is_tied = self._before.ties or self._after.ties
        if not is_tied or not _is_head(name) or not isinstance(target, Replaced):
            return False
        for other_name, other in self._adapter.targets.items():
            if isinstance(other, Replaced) and other_name != name and other.value.equal(target.value):
                return True
        return False

    def _add_extra_tensor(self, name: str, stored: Stored) -> None:
        """Judge a tensor that the base does not have on disk: the adapter has it, or it is a tied head, or extra."""
        target = self._adapter.targets.get(name)
        if isinstance(target, Replaced):
            state = TensorState.of(name, stored, target)
            self._judge.judge_saved(state, stored.read(), target, None)
            self.result.tensors.append(state)
            return
        if isinstance(target, LowRankTarget):
            state = TensorState.of(name, stored, target)
            drawn = "what the adapter adds to was drawn when training began, and is in this folder alone"
            state.mark_skipped(f"{name} is in no file of the base: {drawn}")
            self.result.tensors.append(state)
            return
        embedding = self._embedding_like(stored) if self._before.ties and _is_head(name) else None
        if embedding is not None:
            self._add_tied_head(name, stored, embedding)
            return
        state = TensorState.of(name, stored, None)
        state.role, state.status, state.reason = "extra", "unexpected", "neither base nor adapter has it"
        if any(part in f".{name}" for part in _LEFTOVER):
            self._leftover.append(name)
        self.result.tensors.append(state)

    def _add_leftover(self) -> None:
        """Add the problem that PEFT's own layers are in the folder: with the deltas in their weights, or without."""
        first, count = self._leftover[0], len(self._leftover)
        verb = "is a name" if count == 1 else f"and {count - 1} more are names"
        adapted = self.result.with_role("adapted")
        right = [state for state in adapted if state.status in ("equal", "within") and not state.is_delta_zero]
        if right:
            text = (
                f"{first} {verb} of PEFT's own layers: the deltas are merged into their weights (merge_adapter()), and "
            )
            text += "the layers were saved with them"
        else:
            text = f"{first} {verb} of PEFT's own layers: the model was saved before the merge"
        todo = "save what merge_and_unload() returns, by its save_pretrained()"
        problem = Problem(cause=MergeCause.FILES, text=text, tensors=tuple(self._leftover), todo=todo)
        self.result.problems.append(problem)

    def _embedding_like(self, stored: Stored) -> str | None:
        """Return the name of the base's first embedding of the same shape."""
        for name, other in self._base.items():
            if "emb" in name and other.shape == stored.shape:
                return name
        return None

    def _add_tied_head(self, name: str, stored: Stored, embedding: str) -> None:
        """Judge a head that the base has as its embedding alone; a folder that ties both must have them equal."""
        merged_embedding = self._merged.get(embedding)
        if self._after.ties and (merged_embedding is None or not torch.equal(stored.read(), merged_embedding.read())):
            text = f"the folder holds {name} and {embedding}, which differ; loading takes one of them"
            self.result.add_problem(MergeCause.TIED, text, [name, embedding])
            return
        target = self._adapter.targets.get(embedding)
        self.result.tensors.append(self._judge.judge(name, self._base[embedding], stored, target))

    def _sum_up(self) -> None:
        """Explain by a whole what single tensors do not show: another base, experts or a tower left out."""
        if not self._compares_bases:
            leave_out_untargeted(self.result, self._configs)
            name_exchanged_folders(self.result)
            explain_by_backbone(self.result, self._configs, self._read_pair)
            explain_changed(self.result, self._configs, self._read_pair)
        wrong = [state for state in self.result.with_role("adapted") if state.status == "outside"]
        if self._leftover:
            self._add_leftover()
        if self._broken:
            self._add_broken_adapter()
        self._add_half_types()
        _name_exchanged_layers(wrong)
        self._explain_by_part_left_out(wrong)
        self._check_loading()

    def _read_pair(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a tensor of the folder and the base's; None where they have other shapes, or are quantized."""
        merged, base = self._merged.get(name), self._base.get(name)
        if merged is None or base is None or merged.shape != base.shape or merged.step is not None:
            return None
        return merged.read(), base.read()

    def _check_loading(self) -> None:
        """Add what of the folder transformers does not load, and what lies beside the weights and is not the base's."""
        absent = {state.name for state in self.result.tensors if state.status == "missing"}
        problems, not_checked = loading_problems(self._case, self._before, self._after, absent)
        self.result.problems += problems
        self.result.not_checked += not_checked
        self.result.settings += settings_findings(self._case, self._before, self._after, self.result.dtype)

    def _add_broken_adapter(self) -> None:
        """Name the adapter's tensors that are not finite, and how much of the folder cannot be judged for it."""
        texts = [f"{name}: {where}" for name, where in self._broken[:_MOST_BROKEN]]
        if left_out := and_more(len(self._broken) - _MOST_BROKEN, "tensor"):
            texts.append(left_out)
        unjudged = [state.name for state in self.result.tensors if MergeCause.ADAPTER_NOT_FINITE in state.causes]
        if unjudged:
            adapted = self.result.with_role("adapted", "saved")
            texts.append(f"{len(unjudged)} of {counted(len(adapted), 'adapted tensor')} cannot be judged for it")
        self.result.add_problem(MergeCause.ADAPTER_NOT_FINITE, "; ".join(texts), unjudged)

    def _add_half_types(self) -> None:
        """Name the tensors whose values went through a half type that is not their own."""
        half_types = self._judge.half_types
        if half_types:
            tensors = sorted(half_types)
            first = tensors[0]
            text = f"{counted(len(tensors), 'tensor')}, such as {first}, rounded through {half_types[first]}"
            self.result.add_problem(MergeCause.LOSS, text, tensors, "warning")

    def _explain_by_part_left_out(self, wrong: list[TensorState]) -> None:
        """Give the cause to tensors that hold the base alone where these are all experts, or a whole part."""
        unmerged = [state for state in wrong if set(state.causes) == {MergeCause.NOT_MERGED}]
        merged_names = [state.name for state in self.result.with_role("adapted") if state not in unmerged]
        if not unmerged or not merged_names:
            return
        are_experts = all(".experts." in state.name for state in unmerged)
        if are_experts and not any(".experts." in name for name in merged_names):
            causes = {MergeCause.EXPERTS_LEFT_OUT: ""}
        elif part := _common_part([state.name for state in unmerged], merged_names):
            causes = {MergeCause.TOWER_LEFT_OUT: part}
        else:
            return
        for state in unmerged:
            state.causes = dict(causes)


def _name_exchanged_layers(wrong: list[TensorState]) -> None:
    """Name the layer whose delta each tensor has instead of its own, or that two have each other's.

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


def _is_head(name: str) -> bool:
    """Return whether a name is of a parameter of the head: `lm_head.weight`."""
    parts = name.split(".")
    return len(parts) > 1 and parts[-2] in _HEADS


def _common_part(unmerged: list[str], merged: list[str]) -> str:
    """Return the shortest beginning that all unmerged names share and no merged one has: `vision_tower`.

    Empty where there is none: layers by number are no part of their own.
    """
    beginning: list[str] = []
    for column in zip(*(name.split(".") for name in unmerged), strict=False):
        if len(set(column)) > 1 or column[0].isdigit() or column[0] == "layers":
            break
        beginning.append(column[0])
        prefix = ".".join(beginning)
        if not any(name.startswith(f"{prefix}.") for name in merged):
            return prefix
    return ""


def _most_frequent_dtype(tensors: Iterable[Stored]) -> str:
    """Return the name of the dtype that most matrices have; empty where there are none."""
    counts = Counter(name_of(tensor.dtype) for tensor in tensors if len(tensor.shape) > 1)
    return counts.most_common(1)[0][0] if counts else ""


def _refuse_model_of_diffusers(base: Path, adapter: str) -> None:
    """Raise InputError where an adapter takes a model, and that is one of diffusers, which is not made here."""
    if not recognition.is_of_diffusers(base):
        return
    raise InputError(
        "what this adapter adds is computed by its model, and this base is one of diffusers",
        where=adapter,
        got="a method other than LoRA, or a LoRA that no name in its file, but a model, places",
        wanted="a LoRA on linear layers and convolutions",
        hint="merge it once more by diffusers, and compare both folders: consistency diff FOLDER OTHER",
    )
