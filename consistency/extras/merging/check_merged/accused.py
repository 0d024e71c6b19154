"""Who is to blame for tensors that are wrong: what base, adapter's config and file say of them is asked first.

Another base is named where untouched tensors say so and adapted ones do not deny it. Before that, a layer that the
adapter's own config leaves out, or that its file lacks, and a base that was read in 4 bits explain more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from consistency.capture.wording import layers_text
from consistency.extras.merging.check_merged.adapter import LowRankTarget
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.levels import base_levels
from consistency.extras.merging.check_merged.merge_writer import MergeWriter
from consistency.extras.merging.check_merged.question import MergeQuestion
from consistency.extras.merging.check_merged.state import MergedFolder, TensorState
from consistency.worker.model.saved_adapter.config_fit import targeted

_BLOCK = 64
"""Values that LoftQ quantizes with one scale."""

_MOST_BLOCKS = 1024
"""Blocks of a weight that are looked at."""

NEGATIVE = "its negative"
"""How an explanation by another scaling begins where it is the adapter's own, with the other sign."""

Read = Callable[[str], tuple[torch.Tensor, torch.Tensor] | None]
"""Reads a tensor of the folder and the base's by its name; None where one of them is not to be read."""


def leave_out_untargeted(result: MergedFolder, configs: Sequence[Mapping[str, Any]]) -> None:
    """Take tensors that hold the base for right where `target_modules` does not name them: PEFT leaves these out.

    That the file has something for them is a remark on the adapter.
    """
    for state in result.with_role("adapted"):
        holds_base = state.status == "outside" and set(state.causes) == {MergeCause.NOT_MERGED}
        if holds_base and all(targeted(config, _module(state)) is False for config in configs):
            state.role, state.status, state.outside = "untouched", "equal", 0
            state.causes, state.worst = {}, None


def name_exchanged_folders(result: MergedFolder) -> None:
    """Give the cause to tensors that all hold base − adapter."""
    wrong = [state for state in result.with_role("adapted") if not state.is_delta_zero]
    if wrong and all(state.causes.get(MergeCause.WRONG_SCALE, "").startswith(NEGATIVE) for state in wrong):
        for state in wrong:
            state.causes = {MergeCause.EXCHANGED: ""}


def explain_changed(result: MergedFolder, configs: Sequence[Mapping[str, Any]], read: Read) -> None:
    """Give the cause to tensors that are changed although the adapter's file has nothing for them."""
    wrong = [state for state in result.with_role("adapted") if state.status == "outside"]
    untouched = result.with_role("untouched")
    changed = [state for state in untouched if state.status == "outside"]
    _explain_by_config(changed, configs)
    changed = [state for state in changed if not state.causes]
    if any(MergeCause.FOUR_BIT_BASE in state.causes for state in wrong):
        _explain_by_four_bits(changed, read)
        changed = [state for state in changed if not state.causes]
    unchanged = [state for state in untouched if state.status in ("equal", "within")]
    # a delta that is right to the element is right on the base that was given
    denies = any(
        state.status in ("equal", "within") and not state.is_delta_zero for state in result.with_role("adapted")
    )
    if not denies and _count_matrices(changed) > _count_matrices(unchanged):
        unexplained = [state for state in wrong if not state.causes]
        for state in [*changed, *unexplained]:
            state.causes = {MergeCause.OTHER_BASE: ""}


def _explain_by_config(changed: Sequence[TensorState], configs: Sequence[Mapping[str, Any]]) -> None:
    """Explain changed tensors of layers that adapter_config.json names, and for which its file has nothing."""
    lacking = []
    for state in changed:
        if len(state.shape) > 1 and any(targeted(config, _module(state)) for config in configs):
            lacking.append(state)
    for state in lacking:
        state.causes = {MergeCause.PART_OF_ADAPTER: layers_text([_module(one) for one in lacking])}


def _explain_by_four_bits(changed: Sequence[TensorState], read: Read) -> None:
    """Explain changed matrices by the rounding to 4 bits that explains adapted ones."""
    for state in changed:
        pair = read(state.name) if len(state.shape) == 2 else None
        if pair is not None and _are_four_bits(*pair):
            state.causes = {MergeCause.FOUR_BIT_BASE: ""}


def _are_four_bits(actual: torch.Tensor, base: torch.Tensor) -> bool:
    """Return whether a matrix is the base's, rounded to 4 bits."""
    rows, columns = base.shape
    nothing = LowRankTarget(name="", left=torch.zeros(1, rows, 1), right=torch.zeros(1, 1, columns), scaling=1.0)
    question = MergeQuestion(actual=actual[None], base=base[None], target=nothing, writer=MergeWriter())
    return MergeCause.FOUR_BIT_BASE in base_levels(question)


def explain_by_backbone(result: MergedFolder, configs: Sequence[Mapping[str, Any]], read: Read) -> None:
    """Judge a LoftQ adapter by its base: it is for the backbone that LoftQ left, whose weights have few levels."""
    of_loftq = [config for config in configs if config.get("init_lora_weights") == "loftq"]
    if not of_loftq:
        return
    bits = max(int((config.get("loftq_config") or {}).get("loftq_bits", 4)) for config in of_loftq)
    for state in result.with_role("adapted"):
        pair = read(state.name) if len(state.shape) == 2 else None
        if pair is None or _has_few_levels(pair[1], bits):
            continue
        if state.status in ("equal", "within"):
            state.mark_wrong(state.elements)
            state.causes = {MergeCause.RESIDUAL_BASE: ""}
        elif state.status == "outside" and not state.causes:
            state.causes = {MergeCause.BACKBONE: ""}
            state.advice = ""  # what was measured against another base leads nowhere


def _has_few_levels(base: torch.Tensor, bits: int) -> bool:
    """Return whether each block of 64 of a weight has no more values than so many bits tell apart."""
    if base.numel() % _BLOCK:
        return True  # LoftQ does not quantize it so
    blocks = base.reshape(-1, _BLOCK)[:_MOST_BLOCKS].float().sort(dim=1).values
    values = 1 + (blocks[:, 1:] != blocks[:, :-1]).sum(dim=1)
    return bool((values <= 2**bits).all())


def _module(state: TensorState) -> str:
    return state.name.rpartition(".")[0]


def _count_matrices(states: Sequence[TensorState]) -> int:
    return sum(len(state.shape) > 1 for state in states)
