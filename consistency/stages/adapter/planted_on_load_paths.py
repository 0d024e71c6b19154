"""Faults of one load path: where PEFT chooses the device, with `low_cpu_mem_usage`, or in transformers' loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, changing, instead, together

Tensors = dict[str, torch.Tensor]


def _on_load_paths(applies: Callable[[dict[str, Any]], bool], change: Callable[[Tensors], None]) -> Install:
    """Change what PEFT reads from the adapter's file, in calls with certain options."""
    hit = False

    @instead("peft:PeftModel.load_adapter")
    def note(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        nonlocal hit
        hit = applies(options)
        return real(*args, **options)

    @changing("peft.peft_model:load_peft_weights")
    def load(tensors: Tensors) -> Tensors:
        found = {name: tensor.clone() for name, tensor in tensors.items()}
        if hit:
            change(found)
        return found

    return together(note, load)


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
    done = real(model, *args, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    return done
