"""Apply PEFT to a copy of a model that shares every tensor with it, and leave the model unchanged."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from consistency.extras.peft_api.wrapping.held import Held
from consistency.numerics.identity import start_of
from consistency.worker.model.adapter_settings import tuner_layers

Layers = dict[str, tuple[str, tuple[tuple[int, ...], ...]]]
"""Class and shapes of the adapter's parameters, by the layer's name in the plain model."""


def copy_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy with new modules around the same tensors, which takes hardly any memory."""
    held = Held.by(model).tensors.values()  # tensors in lists and in the states of quantized layers too
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *held)})


@contextlib.contextmanager
def untouched(*models: torch.nn.Module) -> Iterator[None]:
    """Restore what a training step on a copy changes in the tensors that the copy shares with these models.

    Libraries freeze and cast parameters in place, and bitsandbytes removes the rows of a weight from it when the layer
    first computes.
    """
    tensors: dict[int, torch.Tensor] = {}
    for model in models:
        tensors |= {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    kept = [(t, t.data, t.requires_grad, t.grad, dict(vars(t))) for t in tensors.values()]
    try:
        yield
    finally:
        for tensor, data, requires_grad, grad, attributes in kept:
            if tensor.data is not data and start_of(tensor.data) != start_of(data):
                tensor.data = data
            tensor.requires_grad_(requires_grad)
            tensor.grad = grad
            vars(tensor).clear()
            vars(tensor).update(attributes)


def adapted_layers(model: torch.nn.Module, prefix: str) -> Layers:
    """Return the adapted layers, by their names in the plain model."""
    layers: Layers = {}
    for name, layer in tuner_layers(model):
        parameters = [p for key, p in layer.named_parameters() if not key.startswith("base_layer.")]
        shapes = tuple(sorted(tuple(p.shape) for p in parameters))
        layers[name.removeprefix(prefix)] = (type(layer).__name__, shapes)
    return layers


def inject(model: torch.nn.Module, config: Any) -> Any:
    """Adapt a copy of a model by `get_peft_model`, with parameters that take no memory."""
    from peft import get_peft_model

    return get_peft_model(copy_of(model), copy.deepcopy(config), low_cpu_mem_usage=True)


def inject_anyway(model: torch.nn.Module, config: Any) -> torch.nn.Module:
    """Inject an adapter into a copy of a model that `get_peft_model` rejects."""
    from peft import inject_adapter_in_model

    adapted = inject_adapter_in_model(copy.deepcopy(config), copy_of(model), low_cpu_mem_usage=True)
    assert isinstance(adapted, torch.nn.Module)
    return adapted


def is_quantized(model: torch.nn.Module) -> bool:
    """Report whether `prepare_model_for_kbit_training` applies to a model."""
    return any(getattr(model, flag, False) for flag in ("is_loaded_in_8bit", "is_loaded_in_4bit", "is_quantized"))


def prepared(model: torch.nn.Module, *, quantized: bool) -> torch.nn.Module:
    """Return a copy prepared for training as a user would prepare it."""
    from peft import prepare_model_for_kbit_training

    copied = copy_of(model)
    return prepare_model_for_kbit_training(copied) if quantized else copied


def checkpointed(model: torch.nn.Module) -> int:
    """Count the modules that recompute their activations."""
    return sum(bool(getattr(module, "gradient_checkpointing", False)) for module in model.modules())
