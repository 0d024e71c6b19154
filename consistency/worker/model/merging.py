"""Merge the adapter into one layer by PEFT's own code, and leave the layer as it was, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from consistency.worker.model.loading import ADAPTER_NAME

# what PEFT raises where it does not merge
NO_MERGE = (NotImplementedError, ValueError, RuntimeError, AttributeError, TypeError)


def adapted_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of every layer that the adapter changes, in the model's order."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and hasattr(module, "merge") and hasattr(module, "get_base_layer"):
            yield name, module


@contextmanager
def merged(layer: Any, *, safe: bool) -> Iterator[torch.Tensor]:
    """Merge one layer by PEFT's own code, yield the merged weight, and restore the layer to the bit at the end."""
    with restored(layer):
        layer.merge(safe_merge=safe, adapter_names=[ADAPTER_NAME])
        yield weight_of(layer)


@contextmanager
def restored(layer: Any) -> Iterator[None]:
    """Unmerge one layer at the end, and restore its weights to the bit."""
    base = layer.get_base_layer()
    kept = [(p, p.data, p.detach().clone()) for p in base.parameters(recurse=False)]
    with torch.no_grad():
        try:
            yield
        finally:
            if layer.merged_adapters:
                layer.unmerge()
            for parameter, data, copied in kept:
                data.copy_(copied)
                parameter.data = data  # the storage it had, which a tied weight shares


def weight_of(layer: Any) -> torch.Tensor:
    """Return the weight that a merge changes: of the base layer, or the parameter that PEFT wraps by its name."""
    weight = layer.get_param() if hasattr(layer, "get_param") else layer.get_base_layer().weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()
