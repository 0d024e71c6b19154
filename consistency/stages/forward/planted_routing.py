"""Faults in what a device decides, and a model that decides: a mixture of experts, where a router picks two of four."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import instead

Select = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def mixture() -> torch.nn.Module:
    """Return a small model with weights that are the same on every machine."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    model: torch.nn.Module = MixtralForCausalLM(config).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:  # norms keep their ones; sines, because torch.randn depends on the kernels in use
                angles = torch.arange(parameter.numel(), dtype=torch.float64) * (number + 7.3)
                parameter.copy_((angles.sin() * parameter.shape[-1] ** -0.5).reshape(parameter.shape))
    return model


@instead("torch:topk")
def smallest(real: Select, scores: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the experts with the smallest scores."""
    return real(scores, *args, **{**kwargs, "largest": False})
