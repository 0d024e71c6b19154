"""Which kernel of attention ran: the CPU has a fused one too, `flash`, and none that is `mem_efficient`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import peft
import torch
from torch.nn import functional

from consistency.capture.records import TensorRecord
from consistency.worker.attention_kernels import AttentionKernels
from consistency.worker.determinism import deterministic
from tests.worker.conftest import Look
from tests.worker.model.made_models import on_llama

FLASH, EFFICIENT = {"sdpa_flash": True}, {"sdpa_mem_efficient": True}


def attend(*, mask_with_gradient: bool = False) -> AttentionKernels:
    one = torch.ones(1, 2, 4, 8)
    mask = torch.zeros(4, 4, requires_grad=True) if mask_with_gradient else None
    found = AttentionKernels()
    with found:
        functional.scaled_dot_product_attention(one, one, one, attn_mask=mask)
    return found


def test_the_formula_is_what_runs_when_kernels_are_pinned() -> None:
    with deterministic(threads=1):
        found = attend()
    assert (found.evidence(), found.missed()) == ({}, "")


def test_a_kernel_that_was_asked_for_and_ran_is_named() -> None:
    with deterministic(threads=1, **FLASH):
        found = attend()
    assert (found.evidence(), found.missed(), found.never_called()) == ({"attention": "flash"}, "", "")


def test_a_kernel_that_does_not_take_the_inputs_is_missed() -> None:
    with deterministic(threads=1, **FLASH):
        assert attend(mask_with_gradient=True).missed().startswith("math ran: torch's flash attention")
    with deterministic(threads=1, **EFFICIENT):
        assert attend().missed().startswith("math ran: torch's mem_efficient attention")


def test_torch_s_own_choice_misses_nothing() -> None:
    with deterministic(threads=1, **FLASH, **EFFICIENT, sdpa_cudnn=True):
        assert attend(mask_with_gradient=True).missed() == ""


def test_a_model_that_calls_no_attention_says_nothing_of_a_kernel() -> None:
    with deterministic(threads=1, **FLASH), AttentionKernels() as found:
        torch.ones(2).softmax(-1)
    assert "does not call" in found.never_called()


def test_rows_of_a_kernel_that_did_not_run_are_skipped_and_others_name_it(llama: Path, look: Look) -> None:
    adapter = on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    stages = ("operators", "forward", "gradient")

    def attended(settings: Mapping[str, bool]) -> list[TensorRecord]:
        rows = look(llama, adapter, stages=stages, settings=settings)
        kept = [r for r in rows if r.rule in ("block", "bound") and "end" not in r.tensor and "updated" not in r.tensor]
        return [r for r in kept if r.layer == "attention" or "layers." in r.layer]

    ran, missed = attended(FLASH), {r.key: r for r in attended(EFFICIENT)}
    judged = [r for r in ran if r.status in ("within", "equal")]
    assert {r.stage for r in judged} == set(stages)
    assert {r.evidence.get("attention") for r in judged if r.rule == "block"} == {"flash"}
    for row in (missed[r.key] for r in judged):
        assert (row.status, row.unsupported) == ("skipped", True), row.key
        assert str(row.reason).startswith("math ran"), row.key
