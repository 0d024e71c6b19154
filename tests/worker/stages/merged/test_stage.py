"""What is computed and measured once for a layer, and that the records are those of one tensor after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
from peft.tuners.lora.layer import Linear

from consistency.capture.records import TensorRecord
from consistency.case.stages import Stage
from consistency.numerics.chunks import LowRankProduct, LowRankTensor
from consistency.numerics.error import measure_low_rank
from consistency.numerics.measure import Measure
from consistency.worker.stages.merged import judging, stage
from tests.worker.conftest import Look
from tests.worker.model.made_models import on_llama

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving


@pytest.fixture
def merged(llama: Path, look: Look) -> Callable[..., list[TensorRecord]]:
    """Return the records of the stage, of a LoRA in float32 on a base in bfloat16, whose safe merge rounds twice."""
    adapter = on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))

    def run(**changes: Any) -> list[TensorRecord]:
        found = look(llama, adapter, **{"dtype": "bfloat16", "stages": (Stage.MERGED,), **changes})
        return [msgspec.structs.replace(record, order=0) for record in found]

    return run


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many tensors each pass over a layer's exact values measures."""
    seen = []

    def measure(tensors: Sequence[LowRankTensor], product: LowRankProduct) -> list[Measure]:
        seen.append(len(tensors))
        return measure_low_rank(tensors, product)

    monkeypatch.setattr(judging, "measure_low_rank", measure)
    return seen


@pytest.fixture
def deltas(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the deltas that PEFT computes."""
    seen: list[torch.Tensor] = []
    real = Linear.get_delta_weight

    def get_delta_weight(layer: Any, adapter: str) -> torch.Tensor:
        seen.append(real(layer, adapter))
        return seen[-1]

    monkeypatch.setattr(Linear, "get_delta_weight", get_delta_weight)
    return seen


def test_the_tensors_of_a_layer_are_measured_in_one_pass(
    merged: Callable[..., list[TensorRecord]], passes: list[int], deltas: list[torch.Tensor]
) -> None:
    records = merged()
    assert [(r.tensor, r.status) for r in records] == 2 * [
        ("delta", "within"), ("weight", "within"), ("weight_safe_merge", "within"),
    ]  # fmt: skip
    assert passes == [3, 3]
    assert len(deltas) == 2


def test_a_large_layers_tensors_are_held_one_at_a_time_and_measured_as_well(
    merged: Callable[..., list[TensorRecord]], passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = merged()
    passes.clear()
    monkeypatch.setattr(stage, "_TOGETHER_BYTES", 0)
    assert merged() == together
    assert passes == [1] * 6


def test_the_same_bits_are_measured_once(merged: Callable[..., list[TensorRecord]], passes: list[int]) -> None:
    records = merged(dtype="float32")  # neither merge rounds the delta
    assert passes == [2, 2]
    for _, plain, safe in zip(*[iter(records)] * 3, strict=True):
        assert (plain.digest, plain.measure) == (safe.digest, safe.measure)
        assert safe.measure is not None


def test_runs_that_are_compared_compute_the_delta_anew(
    merged: Callable[..., list[TensorRecord]], deltas: list[torch.Tensor]
) -> None:
    assert all(r.repeats == (r.digest,) for r in merged(repeat=2))
    assert len(deltas) == 2 * 2 * 3


def test_a_merge_that_writes_into_its_delta_spoils_nothing(
    merged: Callable[..., list[TensorRecord]], deltas: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = merged()
    real = Linear.merge

    def merge(layer: Any, **options: Any) -> None:
        real(layer, **options)
        deltas[-1].mul_(2)

    monkeypatch.setattr(Linear, "merge", merge)
    assert merged() == healthy


def test_pefts_own_reason_is_given_where_a_whole_block_is_not_merged(llama: Path, look: Look) -> None:
    config = peft.ShadowConfig(r=2, shadow_num_hidden_layers=1, task_type="CAUSAL_LM")
    found = look(llama, on_llama(llama, config), stages=(Stage.MERGED,))
    assert [one.status for one in found] == ["skipped"] * 2, "merged, and merged safely"
    expected = "PEFT does not merge this layer: NotImplementedError: ShadowPEFT cannot be merged"
    assert all(one.reason is not None and one.reason.startswith(expected) for one in found)
