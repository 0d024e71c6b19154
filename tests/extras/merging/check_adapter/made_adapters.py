"""Adapters as PEFT saves them, healthy ones, and one flaw at a time in their files."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]


def save_base(folder: Path, *, attention_bias: bool = False) -> Path:
    """Save a Llama of four layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=attention_bias, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_adapter(folder: Path, base: Path, *, config: peft.PeftConfig | None = None, trained: bool = True) -> Path:
    """Put an adapter on a base, move what can be trained a little, and save it by PEFT."""
    torch.manual_seed(1)
    if config is None:
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of embeddings, of a bias that is never merged, of BOFT's missing extension
        adapted = peft.get_peft_model(model, config)
        if trained:
            train(adapted)
        adapted.save_pretrained(folder)
    return folder


def train(model: torch.nn.Module, seed: int = 2) -> None:
    """Move every parameter that can be trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


def changed(folder: Path, adapter: Path, change: Callable[[State], None] = lambda _: None, **settings: Any) -> Path:
    """Copy an adapter, with another file, and other settings in its config; one that is None is taken out."""
    shutil.copytree(adapter, folder)
    state = load_file(folder / "adapter_model.safetensors")
    change(state)
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / "adapter_model.safetensors")
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder
