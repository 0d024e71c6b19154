"""Tiny models of several architectures, for the trainings that `benchmarks.watched_trainings` watches."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 64
_WIDTHS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "gpt2": ("GPT2Config", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 8}),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "sliding_window": None},
    ),
    "qwen2-moe": ("Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 32}),
}


def causal_model(architecture: str = "llama", **options: Any) -> Any:
    """Return a causal model in float32, with the same weights each time."""
    import transformers

    name, fields = _CONFIGS[architecture]
    widths = {} if architecture == "gpt2" else _WIDTHS
    config = getattr(transformers, name)(**widths | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | fields)
    for field, value in options.items():
        setattr(config, field, value)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def masked_model() -> Any:
    """Return a BERT with dropout in float32."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    widths = {name: value for name, value in _WIDTHS.items() if name != "num_key_value_heads"}
    return BertForMaskedLM(BertConfig(**widths))


def with_lora(model: Any, *, dropout: float = 0.0, dora: bool = False) -> Any:
    """Return a model with a LoRA as PEFT begins one: of its two matrices the second is zero."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_dropout=dropout, use_dora=dora))
