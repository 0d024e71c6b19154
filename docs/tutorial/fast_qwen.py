"""A model of one's own: Qwen2 whose activation is computed by a faster function. It has a mistake; find it."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


class FastActivation(torch.nn.Module):
    """SiLU, in the arithmetic that the processor is fastest at."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` * sigmoid(`values`); any shape."""
        if torch.backends.cpu.get_cpu_capability() == "DEFAULT":  # an old processor: half the bytes are half the time
            return torch.nn.functional.silu(values.bfloat16()).to(values.dtype)
        return torch.nn.functional.silu(values)


def load() -> PreTrainedModel:
    """Return the base."""
    model = AutoModelForCausalLM.from_pretrained("qwen")
    for layer in model.model.layers:
        layer.mlp.act_fn = FastActivation()
    return model
