"""The base under an adapter: each tensor with its own value in the file."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import transformers

from consistency.worker.context import Context
from tests.worker.conftest import Look
from tests.worker.model.made_models import SIZES, adapter_on, saved

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving


@pytest.mark.parametrize("config", [
    peft.LoraConfig(r=2, layer_replication=[[0, 2], [1, 3]], target_modules=["q_proj"]),
    peft.LoraConfig(r=2, layer_replication=[[0, 2], [1, 3]], target_modules=["q_proj"], use_dora=True),
], ids=["lora", "dora"])  # fmt: skip
def test_a_replicated_layer_has_the_weights_of_its_origin(tmp_path: Path, look: Look, config: peft.LoraConfig) -> None:
    """PEFT numbers the layers anew: the file's layer 2 is the model's layer 3, and its layer 2 is the file's 1."""
    sizes = {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2, "max_position_embeddings": 64}
    base = saved(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), tmp_path / "llama")
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    adapter = adapter_on(model, config, tmp_path / "adapter")
    found = look(base, adapter, stages=("base", "adapter", "merged", "forward"))
    assert not [r for r in found if r.status in ("outside", "missing", "unexpected", "blocked")]
    merged = [r for r in found if r.stage == "merged" and r.tensor == "weight"]
    assert [r.layer for r in merged] == [f"model.layers.{n}.self_attn.q_proj" for n in range(4)]
    for record in merged:
        assert record.measure is not None
        assert float(record.measure.max_abs) < 2**-20 * float(record.measure.magnitude)


def test_a_tied_head_has_the_value_of_the_embedding_in_the_file(
    tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = Context.expected_under

    def note(context: Context, layer: str, part: str) -> object:
        value = real(context, layer, part)
        asked.append((layer.rpartition(".")[2], None if value is None else tuple(value.shape)))
        return value

    monkeypatch.setattr(Context, "expected_under", note)
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True
    )
    base = saved(transformers.LlamaForCausalLM(config), tmp_path / "llama")
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=2, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    found = look(base, adapter_on(model, config, tmp_path / "adapter"))
    assert not [r for r in found if r.status in ("outside", "missing", "unexpected", "blocked")]
    assert {r.layer for r in found if r.stage == "merged"} == {"model.embed_tokens", "lm_head"}
    assert set(asked) == {("embed_tokens", (64, 32)), ("lm_head", (64, 32))}
