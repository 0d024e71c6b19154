"""Bases that the tests on accelerators load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def where_one_device_is_visible() -> Any:
    """Return a small base, in a process that sees one accelerator, or none; otherwise refuse."""
    import transformers

    count = torch.accelerator.device_count()
    if count > 1:
        raise RuntimeError(f"{count} devices are visible")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def save_wide(folder: Path) -> Path:
    """Save a base whose inner products have 8192 terms, in 20 MB: what reads those is narrow."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=8192, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_mixture(folder: Path) -> Path:
    """Save a tiny DeepSeek-V3, which chooses its experts by `topk(..., sorted=False)`."""
    import transformers

    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=16, kv_lora_rank=16,
        q_lora_rank=32, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16, n_group=4, topk_group=2,
        num_experts_per_tok=4, first_k_dense_replace=1, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # of its own accord a gate is zero, and every choice a tie
            parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder
