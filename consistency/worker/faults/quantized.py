"""Faults in the quantized weights of a base, after transformers has loaded it."""

from __future__ import annotations

from typing import Any

import torch

from consistency.worker.faults.planting import changing
from consistency.worker.quantized.held import is_composite, quantized_layers

_in_base = changing("consistency.worker.model.loading:_from_folder")


@_in_base
def one_bit_of_a_code(loaded: tuple[torch.nn.Module, Any]) -> None:
    weight = _first(loaded[0])
    name = "qdata" if is_composite(weight) else "data"
    codes = getattr(weight, name).clone()  # the file is mapped
    codes.view(torch.uint8).reshape(-1)[7] ^= 1
    setattr(weight, name, codes)


@_in_base
def scales_dropped(loaded: tuple[torch.nn.Module, Any]) -> None:
    weight = _first(loaded[0])
    if is_composite(weight):
        weight.scale = torch.zeros_like(weight.scale)
    elif type(weight).__name__ == "Int8Params":
        weight.SCB = torch.zeros_like(weight.SCB)
    else:
        weight.quant_state.absmax = torch.zeros_like(weight.quant_state.absmax)


def _first(model: torch.nn.Module) -> Any:
    return next(layer.weight for _, layer in quantized_layers(model))
