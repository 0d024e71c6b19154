"""Reach the adapted model, for faults that are in it."""

from __future__ import annotations

from typing import Any

from consistency.worker.faults.planting import changing
from consistency.worker.model.adapter_settings import tuner_layers

in_adapted_model = changing("peft:PeftModel.from_pretrained")
"""Decorates a function that changes the model in place once its adapter is loaded."""


def own_parameters(model: Any) -> list[str]:
    """Return the names of the parameters that belong to the adapter, in the order of the model."""
    prefixes = ["prompt_encoder."]
    for path, layer in tuner_layers(model):
        prefixes += [f"{path}.{name}." for name in layer.adapter_layer_names]
    return [name for name, _ in model.named_parameters() if name.startswith(tuple(prefixes))]
