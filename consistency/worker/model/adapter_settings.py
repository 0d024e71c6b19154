"""Rank, scaling and active adapters of a model: no tensors, and they change every result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from consistency.capture.names import module_place
from consistency.worker.model.loading import ADAPTER_NAME


def rank_and_scaling(model: torch.nn.Module) -> dict[str, list[Any]]:
    """Return rank and scaling of each layer that PEFT adapts, None where a layer has no such."""
    found: dict[str, list[Any]] = {}
    for name, module in _adapted(model):
        settings = getattr(module, "r", None), getattr(module, "scaling", None)
        found[name] = [of.get(ADAPTER_NAME) if isinstance(of, dict) else None for of in settings]
    return found


def inactive_layers(model: torch.nn.Module) -> list[str]:
    """Return the adapted layers that compute without the adapter."""
    return [
        name
        for name, module in _adapted(model)
        if ADAPTER_NAME not in module.active_adapters or module.disable_adapters
    ]


def _adapted(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield module_place(name), module
