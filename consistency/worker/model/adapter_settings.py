"""Rank, scaling and active adapters of a model: no tensors, and they change every result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from consistency.capture.names import module_place
from consistency.worker.model.loading import ADAPTER_NAME


def rank_and_scaling(model: torch.nn.Module) -> dict[str, list[Any]]:
    """Return rank and scaling of each layer that PEFT adapts, by its name; None where a layer has none."""
    settings: dict[str, list[Any]] = {}
    for name, module in tuner_layers(model):
        ranks, scalings = getattr(module, "r", None), getattr(module, "scaling", None)
        settings[module_place(name)] = [_of_adapter(ranks), _of_adapter(scalings)]
    return settings


def _of_adapter(by_adapter: Any) -> Any:
    """Return a layer's setting for the adapter; None where the layer does not have it by adapter."""
    return by_adapter.get(ADAPTER_NAME) if isinstance(by_adapter, dict) else None


def stated_scaling(layer: Any, adapter: str = ADAPTER_NAME) -> float:
    """Return the scaling that the config of a LoRA asks for, whatever scaling its layer has now.

    It is alpha over the rank, or over its square root with `use_rslora`.
    """
    rank = int(layer.r[adapter])
    is_rank_stabilized = bool(layer.use_rslora.get(adapter, False))
    divisor = math.sqrt(rank) if is_rank_stabilized else rank
    return float(layer.lora_alpha[adapter]) / divisor


def other_scalings(model: Any) -> dict[str, tuple[float, float]]:
    """Return the scalings of a LoRA's layers that differ from the config's, by layer: the layer's and the config's."""
    if getattr(model.peft_config[ADAPTER_NAME].peft_type, "value", "") != "LORA":
        return {}
    differing = {}
    for name, module in tuner_layers(model):
        if ADAPTER_NAME in getattr(module, "r", ()) and ADAPTER_NAME in getattr(module, "scaling", ()):
            scaling, stated = float(module.scaling[ADAPTER_NAME]), stated_scaling(module)
            if not math.isclose(scaling, stated, rel_tol=1e-6):  # either may have been computed in float32
                differing[module_place(name)] = scaling, stated
    return differing


def inactive_layers(model: torch.nn.Module) -> list[str]:
    """Return the names of the adapted layers that compute without the adapter."""
    return [
        module_place(name)
        for name, module in tuner_layers(model)
        if ADAPTER_NAME not in module.active_adapters or module.disable_adapters
    ]


def tuner_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of every layer that PEFT has put in the place of one of the base, in the model's order."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))
