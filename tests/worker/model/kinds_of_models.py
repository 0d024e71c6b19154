"""Small models of several kinds, with inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from tests.worker.model.made_models import a_llama, an_attention

Tensors = dict[str, torch.Tensor]

SMALL = {
    "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 64,
}  # fmt: skip
IDS = torch.arange(24).reshape(2, 12)


def two_layers() -> Any:
    return a_llama(num_hidden_layers=2)


def t5() -> Any:
    config = transformers.T5Config(
        d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=2, vocab_size=64, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def albert() -> Any:
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**{**SMALL, "embedding_size": 16}))


def clip() -> Any:
    size = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    config = transformers.CLIPVisionConfig(**size, image_size=16, patch_size=4)
    return transformers.CLIPVisionModel(config)


def swin() -> Any:
    """Its last stage returns what it makes twice, as the result and as what it was before it is made smaller."""
    config = transformers.Swinv2Config(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4
    )
    return transformers.Swinv2ForImageClassification(config)


def llava() -> Any:
    """Its language model takes hidden states of the vision tower, which transformers collects by hooks of its own."""
    vision = {**SMALL, "model_type": "clip_vision_model", "image_size": 8, "patch_size": 4}
    del vision["vocab_size"]
    text = {**SMALL, "model_type": "llama", "num_key_value_heads": 2}
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=63, image_seq_length=4)
    )


def mamba() -> Any:
    config = transformers.MambaConfig(hidden_size=32, state_size=8, num_hidden_layers=2, vocab_size=64)
    return transformers.MambaForCausalLM(config)


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    )


def no_list() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))


GIVEN: dict[Callable[[], Any], Tensors] = {
    two_layers: {"input_ids": IDS},
    t5: {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]},
    albert: {"input_ids": IDS},
    llava: {
        "input_ids": torch.cat([torch.full((2, 4), 63), IDS], 1),
        "pixel_values": torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8),
    },
    swin: {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)},
    clip: {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)},
    mamba: {"input_ids": IDS},
    mixtral: {"input_ids": IDS},
    an_attention: {"x": torch.linspace(-1, 1, 2 * 6 * 16).reshape(2, 6, 16)},
    no_list: {"input": torch.linspace(-1, 1, 4 * 16).reshape(4, 16)},
}
