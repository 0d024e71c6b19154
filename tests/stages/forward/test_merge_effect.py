"""How far merging moves the outputs, and how far rounding alone must: healthy merges, and merges that lose more."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.lora.layer import Linear

from consistency.capture.merge_effect import MergeEffect
from consistency.case.stage import Level
from consistency.comparison.merging import Advice, Merging, judged
from consistency.numerics.exact import Float64Mode
from consistency.stages.forward import merge_effect
from consistency.worker.model.inputs import first_sequences
from consistency.worker.model.merging import adapted_layers, merged_into
from tests.versions import loads_onto_mixtures
from tests.worker.conftest import Look
from tests.worker.model.made_models import SIZES, adapter_on, on_llama, saved

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving

QV = ["q_proj", "v_proj"]
LORA = peft.LoraConfig(r=4, target_modules=[*QV, "down_proj"])
HALVES = ("bfloat16", "float16")


def effect(look: Look, base: Path, adapter: Path, **changes: Any) -> MergeEffect:
    records = look(base, adapter, stages=("forward",), **changes)
    assert not [record for record in records if record.status in ("outside", "blocked")]
    (found,) = [record.merging for record in records if record.merging is not None]
    return found


def measured(look: Look, base: Path, adapter: Path, **changes: Any) -> Merging:
    return judged("cpu", effect(look, base, adapter, **changes))


def delta_by(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    real = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, adapter: change(real(self, adapter)))


@pytest.mark.parametrize("config", [
    LORA,
    peft.LoraConfig(r=4, target_modules=QV, use_dora=True),
    peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    peft.LoHaConfig(r=4, target_modules=QV),
    peft.HRAConfig(r=4, target_modules=QV),
    peft.FourierFTConfig(n_frequency=30, target_modules=QV),
    peft.LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"]),
], ids=["lora", "dora", "ia3", "loha", "hra", "fourierft", "embeddings"])  # fmt: skip
def test_a_healthy_merge_does_what_rounding_must(look: Look, llama: Path, config: Any) -> None:
    """In float32 a method's own arithmetic counts as well: less than that of the passes, as the advice has it.

    PEFT rounds twice at most: the delta of an embedding, and the sum.
    """
    adapter = on_llama(llama, config)
    for dtype in ("float32", *HALVES):
        found = measured(look, llama, adapter, dtype=dtype)
        assert found.dtype == dtype
        assert found.exact is not None
        assert found.exact < 1e-13, "in exact arithmetic it is the same function"
        assert found.advice == Advice.MERGE
        assert found.positions == 8 * 16
        if dtype in HALVES:
            assert found.ratio is not None
            assert found.ratio < 2
            assert found.must is not None
            assert found.float32 is not None
            assert found.float32 < found.must / 500, "the unit roundoff is smaller by 2**13 or 2**16"


@pytest.mark.parametrize("config", [
    peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
    peft.LoraConfig(r=4, target_modules=["wte"]),
], ids=["conv1d", "tied embedding"])  # fmt: skip
def test_merging_into_a_tied_weight_changes_the_head_too(look: Look, tmp_path: Path, config: Any) -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, "n_positions": 64}
    base = saved(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), tmp_path / "gpt2")
    adapter = adapter_on(transformers.GPT2LMHeadModel.from_pretrained(base), config, tmp_path / "adapter")
    records = look(base, adapter, stages=("forward",), dtype="bfloat16")
    (found,) = [judged("cpu", record.merging) for record in records if record.merging is not None]
    if config.target_modules == {"wte"}:
        assert found.advice == Advice.DO_NOT_MERGE
        assert found.exact is not None
        assert found.must is not None
        assert found.exact > 100 * found.must
        assert found.shared == ("transformer.wte.weight and lm_head.weight",)
    else:
        assert found.advice == Advice.MERGE
        assert not found.shared, "the head and the embeddings share a weight, which nothing is merged into"
        assert found.ratio == pytest.approx(1, abs=0.05)


def test_a_delta_in_low_precision_is_more_than_rounding(
    look: Look, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a bfloat16 weight it hides in the rounding of the weight, and the float32 merge shows it."""
    adapter = on_llama(llama, LORA)
    delta_by(monkeypatch, lambda delta: delta.to(torch.bfloat16).to(delta.dtype))
    in_float32 = _whatever_else(look, llama, adapter, dtype="float32")
    assert in_float32.ratio is not None
    assert in_float32.ratio > 1000
    assert in_float32.advice == Advice.MERGE_IN_FLOAT32
    in_bfloat16 = _whatever_else(look, llama, adapter, dtype="bfloat16")
    assert in_bfloat16.ratio is not None
    assert in_bfloat16.ratio < 3, "a delta as large as the weight"
    assert in_bfloat16.must is not None
    assert in_bfloat16.float32 is not None
    assert in_bfloat16.float32 > in_bfloat16.must / 100


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("factor", [2.0, 1.001])
def test_a_wrong_scale_is_no_rounding(
    look: Look, llama: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, factor: float
) -> None:
    """One part in a thousand of the delta is less than bfloat16 rounds, and seen all the same."""
    adapter = on_llama(llama, LORA)
    delta_by(monkeypatch, lambda delta: delta * factor)
    found = _whatever_else(look, llama, adapter, dtype=dtype)
    assert found.advice == Advice.DO_NOT_MERGE
    assert found.exact is not None
    assert found.exact > 1e-4
    if factor == 2:
        assert found.ratio is not None
        assert found.ratio > 20


def _whatever_else(look: Look, base: Path, adapter: Path, **changes: Any) -> Merging:
    """Return the figures of a merge that the stage itself may find wrong."""
    records = look(base, adapter, stages=("forward",), **changes)
    (found,) = [judged("cpu", record.merging) for record in records if record.merging is not None]
    return found


def test_a_merge_that_is_not_finite(look: Look, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = on_llama(llama, LORA)
    delta_by(monkeypatch, lambda delta: delta * math.inf)
    assert _whatever_else(look, llama, adapter).advice == Advice.NOT_FINITE


@loads_onto_mixtures
def test_all_passes_decide_alike(look: Look, tmp_path: Path) -> None:
    """A router that sends a token to another expert moves the logits by far more than rounding."""
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64)
    base = saved(transformers.MixtralForCausalLM(config), tmp_path / "mixtral")
    adapter = adapter_on(
        transformers.MixtralForCausalLM.from_pretrained(base), peft.LoraConfig(r=4, target_modules=QV), tmp_path / "a"
    )
    found = measured(look, base, adapter, dtype="bfloat16")
    assert found.ratio == pytest.approx(1, abs=0.05)
    assert found.advice == Advice.MERGE


def test_a_method_without_weights_is_not_merged(look: Look, llama: Path) -> None:
    adapter = on_llama(llama, peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    assert effect(look, llama, adapter).reason == (
        "PREFIX_TUNING changes no weight of the base, so there is nothing to merge"
    )


def test_what_has_no_logits(look: Look, tmp_path: Path) -> None:
    base = saved(transformers.BertModel(transformers.BertConfig(**SIZES)), tmp_path / "bert")
    adapter = adapter_on(
        transformers.BertModel.from_pretrained(base), peft.LoraConfig(r=4, target_modules=["query"]), tmp_path / "a"
    )
    found = measured(look, base, adapter, dtype="bfloat16")
    assert found.output == "last_hidden_state"
    assert found.positions is None
    assert found.ratio == pytest.approx(1, abs=0.05)


def test_a_large_model_has_the_figures_of_the_stage_alone(look: Look, llama: Path) -> None:
    found = effect(look, llama, on_llama(llama, LORA), dtype="bfloat16", level=Level.QUICK)
    assert "level thorough" in found.left_out
    assert found.moved is None
    assert found.computed is not None
    assert found.unmerged_error is not None
    assert found.merged_error is not None
    assert found.merged_error < 3 * found.unmerged_error
    assert found.top1_changed is not None


def test_an_error_on_the_way_costs_these_figures_alone(
    look: Look, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("of this model alone")

    monkeypatch.setattr(merge_effect, "in_merged", fails)
    found = effect(look, llama, on_llama(llama, LORA))
    assert "of this model alone" in found.left_out
    assert found.computed is not None


@pytest.mark.parametrize("config", [LORA, peft.LoraConfig(r=4, target_modules=QV, use_dora=True)], ids=["lora", "dora"])
def test_the_model_is_left_as_it_was(llama: Path, config: Any) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    model = peft.PeftModel.from_pretrained(model, on_llama(llama, config)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merges = (
        merge_effect._in_its_dtype, merge_effect._in_float32, merge_effect._in_float64, merge_effect._rounded_once
    )  # fmt: skip
    dtypes = []
    for merge in merges:
        for name, layer in adapted_layers(model):
            with torch.no_grad(), Float64Mode() as mode, merge(mode, layer):
                assert layer.merged, name
                dtypes.append(next(iter(merged_into(layer))).dtype)
    assert dict.fromkeys(dtypes) == dict.fromkeys([torch.bfloat16, torch.float32, torch.float64])
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], now) and before[name].dtype == now.dtype for name, now in after.items())
    assert not any(layer.merged for _, layer in adapted_layers(model))


def test_the_first_sequence_of_a_batch() -> None:
    batch = {"a": torch.ones(3, 2), "b": torch.ones(3)}
    assert {name: tuple(tensor.shape) for name, tensor in first_sequences(batch, 1).items()} == {"a": (1, 2), "b": (1,)}
    for no_batch in ({"a": torch.ones(3, 2), "b": torch.ones(2)}, {"a": torch.tensor(1.0)}):
        assert first_sequences(no_batch, 1) is no_batch
