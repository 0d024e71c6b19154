"""Planted faults of the stage `memory`: bytes on another device, and a third copy of a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.adapted_model import in_adapted_model, own_parameters
from consistency.worker.faults.planting import Undo, instead
from consistency.worker.memory.placement import other_devices

STRAY_BYTES = 64 << 20
"""More than twice the built-in adapters: PEFT's default load path cannot explain it."""

_stray: list[torch.Tensor] = []


@in_adapted_model
def one_elsewhere(model: Any) -> None:
    """Leave one tensor of the adapter on another accelerator, else on the CPU, else where tensors have no bytes."""
    adapter_names = own_parameters(model)
    names = sorted(name for name in adapter_names if "lora_A" in name) or adapter_names
    path, _, leaf = names[min(1, len(names) - 1)].rpartition(".")
    module = model.get_submodule(path)
    parameter = getattr(module, leaf)
    host_or_nowhere = "meta" if parameter.device.type == "cpu" else "cpu"
    elsewhere = next(iter(other_devices(parameter.device)), torch.device(host_or_nowhere))
    setattr(module, leaf, torch.nn.Parameter(parameter.detach().to(elsewhere)))


@in_adapted_model
def _stray_bytes(model: Any) -> None:
    """Allocate memory on a device that the model is not on, and keep it."""
    model_device = next(model.parameters()).device
    for elsewhere in other_devices(model_device)[:1]:
        _stray.append(torch.zeros(STRAY_BYTES, dtype=torch.uint8, device=elsewhere))


def stray_bytes() -> Undo:
    """Allocate memory on another device until the fault is undone."""
    undo = _stray_bytes()

    def release() -> None:
        undo()
        _stray.clear()

    return release


@instead("peft.tuners.lora.layer:Linear.merge")
def third_copy(
    real: Callable[..., None], layer: Any, safe_merge: bool = False, adapter_names: list[str] | None = None
) -> None:
    """Merge as PEFT did before its pull request 1944: by a sum that is a new weight besides the old one."""
    if safe_merge or layer.lora_variant:
        real(layer, safe_merge=safe_merge, adapter_names=adapter_names)
        return
    for name in adapter_names or layer.active_adapters:
        delta = layer.get_delta_weight(name)
        base = layer.get_base_layer()
        base.weight.data = base.weight.data + delta
        layer.merged_adapters.append(name)
