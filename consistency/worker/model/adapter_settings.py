"""Rank, scaling and active adapters of a model: no tensors, and they change every result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from consistency.capture.names import module_place
from consistency.worker.model.loading import ADAPTER_NAME


def rank_and_scaling(model: torch.nn.Module) -> dict[str, list[Any]]:
    """Return rank and scaling of each layer that PEFT adapts, None where a layer has no such."""
    found: dict[str, list[Any]] = {}
    for name, module in tuner_layers(model):
        settings = getattr(module, "r", None), getattr(module, "scaling", None)
        found[module_place(name)] = [of.get(ADAPTER_NAME) if isinstance(of, dict) else None for of in settings]
    return found


def stated_scaling(layer: Any, adapter: str = ADAPTER_NAME) -> float:
    """Return alpha over rank or its square root, as the config of a LoRA asks, whatever scaling its layer has now."""
    rank = int(layer.r[adapter])
    stabilized = bool(layer.use_rslora.get(adapter, False))
    return float(layer.lora_alpha[adapter]) / (math.sqrt(rank) if stabilized else rank)


def other_scalings(model: Any) -> dict[str, tuple[float, float]]:
    """Return the layers of a LoRA whose scaling is not what its config asks for, with both: its own and that one."""
    if getattr(model.peft_config[ADAPTER_NAME].peft_type, "value", "") != "LORA":
        return {}
    found = {}
    for name, module in tuner_layers(model):
        if ADAPTER_NAME in getattr(module, "r", ()) and ADAPTER_NAME in getattr(module, "scaling", ()):
            own, wanted = float(module.scaling[ADAPTER_NAME]), stated_scaling(module)
            if not math.isclose(own, wanted, rel_tol=1e-6):  # either may have been computed in float32
                found[module_place(name)] = own, wanted
    return found


def inactive_layers(model: torch.nn.Module) -> list[str]:
    """Return the adapted layers that compute without the adapter."""
    return [
        module_place(name)
        for name, module in tuner_layers(model)
        if ADAPTER_NAME not in module.active_adapters or module.disable_adapters
    ]


def tuner_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of every layer that PEFT has put in the place of one of the base, in the model's order."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))
