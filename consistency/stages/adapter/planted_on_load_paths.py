"""Planted faults of one load path: of the device that PEFT chooses, of `low_cpu_mem_usage`, of transformers' loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, changing, instead, together

Tensors = dict[str, torch.Tensor]


def _on_load_paths(applies: Callable[[dict[str, Any]], bool], change: Callable[[Tensors], None]) -> Install:
    """Change the tensors that PEFT reads from the adapter's file, in place, in calls to whose options it applies."""
    is_chosen = False

    @instead("peft:PeftModel.load_adapter")
    def note_options(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        nonlocal is_chosen
        is_chosen = applies(options)
        return real(*args, **options)

    @changing("peft.peft_model:load_peft_weights")
    def load(tensors: Tensors) -> Tensors:
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        if is_chosen:
            change(copies)
        return copies

    return together(note_options, load)


def _drop_b(tensors: Tensors) -> None:
    for name in [name for name in tensors if "lora_B" in name]:
        del tensors[name]


def _round(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(torch.bfloat16).to(tensor.dtype)


# lora_B stays at its initial zeros, as where the copies from the device that PEFT chooses never arrive
no_b = _on_load_paths(lambda options: options.get("torch_device") is None, _drop_b)
through_bfloat16 = _on_load_paths(lambda options: bool(options.get("low_cpu_mem_usage")), _round)


@instead("transformers.integrations.peft:PeftAdapterMixin.load_adapter")
def zeros(real: Callable[..., Any], model: torch.nn.Module, *args: Any, **options: Any) -> Any:
    """Fill LoRA's factors B with zeros after transformers has loaded them."""
    loaded = real(model, *args, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    return loaded
