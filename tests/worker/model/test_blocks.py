"""Which modules are the blocks of a model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModel

from consistency.worker.model.structure import blocks_of


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2}, 3),
        ({"model_type": "t5", "num_layers": 2, "num_decoder_layers": 3, "d_model": 16, "num_heads": 2}, 5),
        ({"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2}, 2),
    ],
)
def test_blocks_are_the_outermost_lists_of_layers(config: dict[str, object], count: int) -> None:
    made = AutoConfig.for_model(**config, vocab_size=32)
    with torch.device("meta"):
        model = AutoModel.from_config(made)
    assert len(blocks_of(model)) == count
