"""Which modules are the blocks of a model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModel

from consistency.worker.model.structure import blocks_of, parts_of


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2}, 3),
        ({"model_type": "t5", "num_layers": 2, "num_decoder_layers": 3, "d_model": 16, "num_heads": 2}, 5),
        ({"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2}, 2),
    ],
)
def test_blocks_are_the_outermost_lists_of_layers(config: dict[str, object], count: int) -> None:
    assert len(blocks_of(made(**config))) == count


def test_parts_of_a_block_are_named_through_the_lists_in_it() -> None:
    """T5 has attention and MLP of a block in a list, whose own hooks never run."""
    t5 = blocks_of(made(model_type="t5", num_layers=1, d_model=16, num_heads=2))
    assert [*parts_of(t5["encoder.block.0"])] == ["layer.0", "layer.1"]
    assert [*parts_of(t5["decoder.block.0"])] == ["layer.0", "layer.1", "layer.2"]
    llama = blocks_of(made(model_type="llama", num_hidden_layers=1, hidden_size=16, num_attention_heads=2))
    assert [*parts_of(llama["layers.0"])] == ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"]


def made(**config: object) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = AutoModel.from_config(AutoConfig.for_model(**config, vocab_size=32))
    return model
