"""Make the two models of the tutorial, each with an adapter: `python make_models.py` writes four folders here.

They have the architectures of Llama and Qwen2 with random weights, 0.2 MB each. What is checked of a model does not
depend on what it has learned.
"""

from __future__ import annotations

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TARGETS = ["q_proj", "v_proj", "down_proj"]


def fill(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter values that NumPy draws, which are the same on every machine."""
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = generator.standard_normal(parameter.shape).astype(np.float32)
            if name.endswith("norm.weight"):
                values = 1 + 0.1 * values
            else:
                values *= 0.6 / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.from_numpy(values))


def make(kind: type[PreTrainedModel], config: PretrainedConfig, name: str, adapter: LoraConfig) -> None:
    """Write a base to the folder `name`, and its adapter to `name`-lora."""
    base = kind(config)
    fill(base, seed=1)
    base.save_pretrained(name)
    with_adapter = get_peft_model(base, adapter)
    fill(with_adapter, seed=2)
    with_adapter.save_pretrained(f"{name}-lora")


if __name__ == "__main__":
    make(LlamaForCausalLM, LlamaConfig(**SIZES), "llama", LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    make(Qwen2ForCausalLM, Qwen2Config(**SIZES), "qwen", LoraConfig(r=4, use_dora=True, target_modules=TARGETS))
