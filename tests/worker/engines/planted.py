"""Mistakes that engines make with an adapter, planted in the model before an engine compiles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.merging import adapted_layers, weight_of


def adapter_ignored(model: Any) -> None:
    for _, layer in adapted_layers(model):
        layer.scaling[ADAPTER_NAME] = 0.0


def scaling_of_one(model: Any) -> None:
    for _, layer in adapted_layers(model):
        layer.scaling[ADAPTER_NAME] = 1.0


def upper_half_without(model: Any) -> None:
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers[len(layers) // 2 :]:
        layer.scaling[ADAPTER_NAME] = 0.0


def merged_in_bfloat16(model: Any) -> None:
    for _, layer in adapted_layers(model):
        weight = weight_of(layer)
        delta = layer.get_delta_weight(ADAPTER_NAME).detach()
        layer.get_base_layer().weight.data = (weight.to(torch.bfloat16) + delta.to(torch.bfloat16)).to(weight.dtype)
    adapter_ignored(model)


MISTAKES: dict[str, Callable[[Any], None]] = {
    "adapter ignored": adapter_ignored,
    "wrong scaling": scaling_of_one,
    "half of the layers": upper_half_without,
    "merged in bfloat16": merged_in_bfloat16,
}
