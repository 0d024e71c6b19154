"""Quantized bases made on the spot: what each library really writes and reads on a CPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.worker.model.made_models import adapter_on, saved

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
"""Several blocks in a row of every format; bitsandbytes' CPU kernels take 32 rows at a time."""

BITSANDBYTES = ("nf4", "nf4-nested", "fp4", "int8")
TORCHAO = ("torchao-int8", "torchao-int4", "torchao-float8")
LAYER = "model.layers.0.self_attn.q_proj"


def need(kind: str) -> None:
    """Skip where the library of a kind is missing."""
    library = "torchao" if kind in TORCHAO else "bitsandbytes"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(library, reason=f"{library} is not installed: pip install 'peft-consistency[quantized]'")


def _settings(kind: str) -> Any:
    if kind in TORCHAO:
        from torchao import quantization

        made = {
            "torchao-int8": lambda: quantization.Int8WeightOnlyConfig(version=2),
            "torchao-int4": lambda: quantization.IntxWeightOnlyConfig(
                weight_dtype=getattr(torch, "int4"),  # noqa: B009 - torch's stubs lack it
                granularity=quantization.PerGroup(32),
            ),
            "torchao-float8": quantization.Float8WeightOnlyConfig,
        }
        return transformers.TorchAoConfig(made[kind]())
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    name, _, nested = kind.partition("-")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=name, bnb_4bit_use_double_quant=bool(nested),
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip


def quantized(kind: str, folder: Path, *, dtype: str = "float32") -> tuple[Path, Path]:
    """Save a small base that is quantized, and an adapter for it; return both folders."""
    need(kind)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    plain = saved(transformers.LlamaForCausalLM(config), folder / "plain")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapter = adapter_on(transformers.LlamaForCausalLM.from_pretrained(plain), lora, folder / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=_settings(kind), dtype=getattr(torch, dtype), device_map={"": "cpu"}
        )
        model.save_pretrained(folder / kind)
    return folder / kind, adapter


def loaded(base: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(base).eval()
