"""Faults planted into trainings by accelerate and by TRL's SFTTrainer are found and named."""

# ruff: noqa: ARG002
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.extras.watching.faults import base_bit, drop_rank, lora_bit, no_fault, scaled_attention
from tests.extras.watching.trainings import Training, flip, is_of_the_device, on_ranks, tiny_llama

pytestmark = [pytest.mark.process, pytest.mark.slow]

LAYER = "model.layers.1"


def as_launched(rank: int, world: int) -> None:
    """Set what a launcher sets."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}


def accelerated(rank: int, world: int, fault: Any) -> Any:
    from accelerate import Accelerator

    as_launched(rank, world)
    model = tiny_llama()
    optimizer = torch.optim.AdamW([tensor for tensor in model.parameters() if tensor.requires_grad], lr=1e-2)
    call, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
    training = Training(rank=rank, world=world, model=model, call=call, optimizer=optimizer)
    training.options = {"timeout_s": 20.0}
    found = training.run(None, fault)
    return [[one.kind, list(one.ranks), one.message, len(one.detail)] for one in found]


@pytest.mark.parametrize(
    ("fault", "kind", "named"),
    [
        (lora_bit, "ranks-differ", f"{LAYER}.self_attn.q_proj.lora_B.default.weight"),
        (base_bit, "base-changed", f"{LAYER}.mlp.up_proj.weight"),
        (scaled_attention, "wrong-block", f"computes {LAYER} wrong"),
        (drop_rank, "wrong-sum", "without rank 1 it is right"),
    ],
)
def test_a_fault_of_one_rank_by_accelerate_is_one_finding(fault: Any, kind: str, named: str) -> None:
    first, *others = on_ranks(3, accelerated, fault)
    assert all(found == first for found in others)
    (found,) = first
    assert found[:2] == [kind, [1]]
    assert named in found[2]
    assert "base_model" not in found[2], "names are those of the model itself"


def test_a_healthy_training_by_accelerate_has_no_finding() -> None:
    assert on_ranks(2, accelerated, no_fault) == [[], []]


class Planted(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """Plant a fault on rank 1 of a Trainer, in the fourth step: an update may round a low bit away."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step != 3 or args.process_index != 1 or not self.fault:
            return
        layer = model.get_base_model().model.layers[1]
        if self.fault == "bit":
            flip(layer.self_attn.q_proj.lora_B["default"].weight)
        else:
            layer.self_attn.register_forward_hook(_scaled)


def _scaled(module: Any, args: Any, output: Any) -> Any:
    return (output[0] * 1.02, *output[1:]) if is_of_the_device() else output


def fine_tuned(rank: int, world: int, fault: str, folder: str) -> Any:
    from benchmarks.watched_trainings import Plan, sft

    as_launched(rank, world)
    plan = Plan(rank=rank, steps=6, every=2, folder=Path(folder), also=(Planted(fault),))
    return sft(lora=True)(plan).findings


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("bit", f"ranks-differ: rank 1 differs from ranks 0, 2 in 1 parameter: {LAYER}.self_attn.q_proj.lora_B"),
        ("attention", f"wrong-block: rank 1 computes {LAYER} wrong"),
        ("", ""),
    ],
)
def test_a_fault_in_a_training_by_trl_is_one_finding(tmp_path: Path, fault: str, said: str) -> None:
    pytest.importorskip("trl")
    first = on_ranks(3, fine_tuned, fault, str(tmp_path))[0]
    assert len(first) == bool(said), first
    assert all(found.startswith(said) for found in first), first
