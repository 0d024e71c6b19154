"""Planted faults in the base after transformers has loaded it, and on the arrival of an offloaded layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import changing, instead
from consistency.worker.quantized.held import is_composite, quantized_layers

_in_base = changing("consistency.worker.model.loading:_from_folder")


@_in_base
def through_bfloat16(loaded: tuple[torch.nn.Module, Any]) -> None:
    for parameter in loaded[0].parameters():
        parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))


@_in_base
def one_bit(loaded: tuple[torch.nn.Module, Any]) -> None:
    weight = max(loaded[0].parameters(), key=lambda p: p.numel())
    weight.reshape(-1)[7:8].view(torch.uint8)[0] ^= 1


@instead("consistency.worker.model.offload:Offload.attach")
def one_bit_on_arrival(real: Callable[..., None], offload: Any, model: torch.nn.Module) -> None:
    """Flip a bit of the last layer's last matrix on the device; the host's copy stays right."""
    real(offload, model)
    last = [part for part in offload.parts if _is_matrix_of_a_layer(part)][-1]
    real_pre_forward = last.hook.pre_forward

    def pre_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = real_pre_forward(module, *args, **kwargs)
        with torch.no_grad():
            module.get_parameter("weight").reshape(-1)[7:8].view(torch.uint8)[0] ^= 1
        return result

    last.hook.pre_forward = pre_forward


def _is_matrix_of_a_layer(part: Any) -> bool:
    """Return whether an offloaded part is a linear layer of a numbered block."""
    weight = part.parameters.get("weight")
    is_matrix = weight is not None and weight.dim() == 2
    is_of_a_layer = any(word.isdigit() for word in part.name.split("."))
    return is_matrix and is_of_a_layer


@_in_base
def one_bit_of_a_code(loaded: tuple[torch.nn.Module, Any]) -> None:
    weight = _first_quantized_weight(loaded[0])
    name = "qdata" if is_composite(weight) else "data"
    codes = getattr(weight, name).clone()  # the file is mapped
    codes.view(torch.uint8).reshape(-1)[7] ^= 1
    setattr(weight, name, codes)


@_in_base
def scales_dropped(loaded: tuple[torch.nn.Module, Any]) -> None:
    weight = _first_quantized_weight(loaded[0])
    if is_composite(weight):
        weight.scale = torch.zeros_like(weight.scale)
    elif type(weight).__name__ == "Int8Params":
        weight.SCB = torch.zeros_like(weight.SCB)
    else:
        weight.quant_state.absmax = torch.zeros_like(weight.quant_state.absmax)


def _first_quantized_weight(model: torch.nn.Module) -> Any:
    return next(layer.weight for _, layer in quantized_layers(model))
