"""What PEFT makes of a model, tried on a copy that shares every tensor with it and leaves the model as it was."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from consistency.worker.wrapper_check.held import Held

Layers = dict[str, tuple[str, tuple[tuple[int, ...], ...]]]
"""Class and shapes of the adapter's parameters, by the layer's name in the plain model."""


def copy_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy with modules of its own around the very tensors of the model: no memory to speak of."""
    memo: dict[int, Any] = {}
    for part in model.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                memo[id(tensor)] = tensor
    for tensor in Held.by(model).tensors.values():  # what lies in lists and in the states of quantized layers
        memo[id(tensor)] = tensor
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def untouched(*models: torch.nn.Module) -> Iterator[None]:
    """Put back what a training step on a copy changes in the tensors that the copy shares with these models.

    Libraries freeze and cast parameters in place, and bitsandbytes takes the rows of a weight away from it when the
    layer first computes.
    """
    tensors = {id(t): t for model in models for t in (*model.parameters(), *model.buffers())}
    kept = [(t, t.data, t.requires_grad, t.grad, dict(vars(t))) for t in tensors.values()]
    try:
        yield
    finally:
        for tensor, data, requires_grad, grad, attributes in kept:
            if tensor.data is not data and tensor.data.data_ptr() != data.data_ptr():
                tensor.data = data
            tensor.requires_grad_(requires_grad)
            tensor.grad = grad
            vars(tensor).clear()
            vars(tensor).update(attributes)


def adapted_layers(model: torch.nn.Module, prefix: str) -> Layers:
    """Return the layers that an adapter sits on, by their names in the plain model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: Layers = {}
    for name, part in model.named_modules():
        if isinstance(part, BaseTunerLayer):
            held = [p for key, p in part.named_parameters() if not key.startswith("base_layer.")]
            shapes = tuple(sorted(tuple(p.shape) for p in held))
            found[name.removeprefix(prefix)] = (type(part).__name__, shapes)
    return found


def inject(model: torch.nn.Module, config: Any) -> Any:
    """Let PEFT put an adapter on a copy of a model, as `get_peft_model` does, with parameters that take no memory."""
    from peft import get_peft_model

    return get_peft_model(copy_of(model), copy.deepcopy(config), low_cpu_mem_usage=True)


def inject_anyway(model: torch.nn.Module, config: Any) -> torch.nn.Module:
    """Let PEFT put an adapter into a copy of a model that `get_peft_model` does not take."""
    from peft import inject_adapter_in_model

    found = inject_adapter_in_model(copy.deepcopy(config), copy_of(model), low_cpu_mem_usage=True)
    assert isinstance(found, torch.nn.Module)
    return found


def is_quantized(model: torch.nn.Module) -> bool:
    """Tell whether `prepare_model_for_kbit_training` has something to prepare."""
    flags = ("is_loaded_in_8bit", "is_loaded_in_4bit", "is_quantized")
    return any(getattr(model, flag, False) for flag in flags)


def prepared(model: torch.nn.Module, *, quantized: bool) -> torch.nn.Module:
    """Return a copy that is ready for training as a user makes it ready."""
    from peft import prepare_model_for_kbit_training

    found = copy_of(model)
    return prepare_model_for_kbit_training(found) if quantized else found


def checkpointed(model: torch.nn.Module) -> int:
    """Count the modules that throw their activations away and compute them again."""
    return sum(bool(getattr(part, "gradient_checkpointing", False)) for part in model.modules())
