"""A long text: what is wrong at its shapes alone is found, in its rows; what is healthy is within in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from consistency.capture.records import TensorRecord
from consistency.case.case import Fit
from consistency.stages.forward import long_text, planted_shapes
from consistency.stages.forward.long_text import where_in_text
from consistency.worker.faults.planting import Install
from consistency.worker.judging.long_text import LongText
from tests.worker.conftest import Look
from tests.worker.model.made_models import SIZES, a_llama, adapter_on, on_llama, saved

TOKENS = 515


@pytest.fixture
def long_llama(tmp_path: Path) -> Path:
    """Return a model with room for the long text of level standard."""
    return saved(a_llama(num_hidden_layers=2, max_position_embeddings=1024), tmp_path / "long")


def of_long(records: list[TensorRecord]) -> dict[tuple[str, str], TensorRecord]:
    return {(row.layer, row.tensor): row for row in records if ".long" in row.tensor}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_are_judged_on_a_long_text(look: Look, long_llama: Path, dtype: str) -> None:
    adapter = on_llama(long_llama, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    found = of_long(look(long_llama, adapter, stages=("forward",), dtype=dtype))
    modules = {f"model.layers.{i}{part}" for i in range(2) for part in ("", ".self_attn", ".mlp", ".input_layernorm")}
    assert {(module, "adapter_on.long") for module in {*modules, "logits"}} <= found.keys()
    assert {row.status for row in found.values()} <= {"equal", "within"}
    judged = [row for row in found.values() if row.measure is not None]
    assert all(float(row.measure.ratio or 0) < 1 for row in judged if row.measure is not None)
    assert {row.evidence["tokens_of_the_text"] for row in judged} == {TOKENS}
    assert all(row.shape[1] < 64 for row in judged), "a sample of rows"


@pytest.mark.parametrize("kind", ["mixtral", "gpt2", "mamba", "bert"])
def test_other_models_have_a_long_text_too(look: Look, tmp_path: Path, kind: str) -> None:
    sizes = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 128}
    models: dict[str, Callable[[], Any]] = {
        "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128)
        ),
        "mamba": lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
        ),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, max_position_embeddings=128)),
    }
    base = saved(models[kind](), tmp_path / kind)
    fit = Fit(long_tokens=125)
    found = of_long(look(base, None, stages=("forward",), fit=fit))
    assert {row.status for row in found.values()} <= {"equal", "within"}
    layers = {layer for layer, _ in found}
    assert "logits" in layers
    if kind == "mixtral":
        assert "model.layers.0.self_attn" in layers
        assert "model.layers.0.mlp" not in layers, "rounding may send a token to another expert"
    else:
        assert any(layer.endswith(".0") for layer in layers), "whole blocks"


def on_the_device_alone(monkeypatch: pytest.MonkeyPatch, plant: Install) -> None:
    """Plant a fault in the device's own pass: the reference of this process keeps right kernels."""
    real = long_text.rows_on_device

    def with_fault(*args: Any, **kwargs: Any) -> Any:
        undo = plant()
        try:
            return real(*args, **kwargs)
        finally:
            undo()

    monkeypatch.setattr(long_text, "rows_on_device", with_fault)


FAULTS = {
    "rows-beyond-128": (planted_shapes.beyond_128_rows, None, "right up to token 127 and wrong from 128 on"),
    "rows-beyond-512": (planted_shapes.beyond_512_rows, None, "right up to token 511 and wrong from 512 on"),
    "last-tile": (planted_shapes.last_tile, None, "right up to token 511 and wrong from 512 on"),
    "window-of-16": (planted_shapes.wide_window_of_16, 16, "right up to token 15 and wrong from 16 on"),
    "window-of-128": (planted_shapes.wide_window_of_128, 128, "right up to token 127 and wrong from 128 on"),
    "long-keys": (planted_shapes.long_keys, None, "in all "),
    "batch-of-1": (planted_shapes.batch_of_1, None, "in all "),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_by_shape_is_found_in_its_rows(
    monkeypatch: pytest.MonkeyPatch, look: Look, tmp_path: Path, name: str
) -> None:
    plant, window, where = FAULTS[name]
    model = planted_shapes.model_with(head_size=16, window=window)
    model.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    on_the_device_alone(monkeypatch, plant)
    found = of_long(look(tmp_path / "base", None, stages=("forward",)))
    wrong = {layer: row for (layer, _), row in found.items() if row.status == "outside"}
    assert "model.layers.0.self_attn" in wrong
    assert where in wrong["model.layers.0.self_attn"].evidence["where"]
    assert "model.layers.0.input_layernorm" not in wrong


def test_the_same_kernels_are_healthy_without_a_fault(look: Look, tmp_path: Path) -> None:
    planted_shapes.model_with(head_size=16, window=16).save_pretrained(tmp_path / "base")  # type: ignore[operator]
    found = of_long(look(tmp_path / "base", None, stages=("forward",)))
    assert {row.status for row in found.values()} <= {"equal", "within"}
    mask = found["model.layers.0", "adapter_off.long.input.attention_mask"]
    assert mask.status == "equal", "the window itself is compared too"


def test_a_case_that_asks_for_none_has_no_long_text(look: Look, long_llama: Path) -> None:
    assert not of_long(look(long_llama, None, stages=("forward",), fit=Fit(long_tokens=0)))
    assert not of_long(look(long_llama, None, stages=("forward",), level="quick"))


def test_the_reason_is_stated_where_there_is_none(look: Look, long_llama: Path) -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = transformers.LlamaForCausalLM.from_pretrained(long_llama)
    adapter = adapter_on(model, config, long_llama.parent / "prompt")
    (row,) = of_long(look(long_llama, adapter, stages=("forward",))).values()
    assert row.status == "skipped"
    assert row.reason == "no long text: the adapter puts tokens or keys of its own before the text"


def test_tokens_are_named_by_where_they_lie() -> None:
    inputs = {"input_ids": torch.zeros(1, 9, dtype=torch.int64)}
    text = LongText(inputs=inputs, rows=torch.tensor([0, 2, 4, 6, 8]), blocks=[])
    assert where_in_text([0, 2, 4, 6, 8], text) == "in a text of 9 tokens, in all 5 tokens that were compared"
    assert where_in_text([6, 8], text).endswith("right up to token 4 and wrong from 6 on, counted from 0")
    assert where_in_text([2, 8], text).endswith("in 2 of 5 tokens that were compared: 2, 8, counted from 0")
