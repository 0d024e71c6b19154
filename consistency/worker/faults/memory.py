"""Faults of place and of memory: a tensor on another device, bytes on a device that nobody asked for, a third copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.adapter import in_adapted_model
from consistency.worker.faults.planting import Install, Undo, replace
from consistency.worker.memory.placement import other_devices

STRAY_BYTES = 64 << 20
"""More than twice the built-in adapters: what passes through on PEFT's own road cannot explain it."""

_stray: list[torch.Tensor] = []


def _after_loading(change: Callable[[Any], None]) -> Install:
    """Change where things lie once PEFT has loaded the adapter, and let go of what was put elsewhere at the end."""

    def install() -> Undo:
        undo = in_adapted_model(change)()

        def take_away() -> None:
            undo()
            _stray.clear()

        return take_away

    return install


def _one_elsewhere(model: Any) -> None:
    """Leave one tensor of the adapter on another accelerator, else on the CPU, else where tensors have no bytes."""
    name = sorted(n for n, _ in model.named_parameters() if "lora_A" in n)[1]
    module = model.get_submodule(name.rpartition(".")[0])
    here = module.weight.device
    elsewhere = next(iter(other_devices(here)), torch.device("meta" if here.type == "cpu" else "cpu"))
    module.weight = torch.nn.Parameter(module.weight.detach().to(elsewhere))


def _stray_bytes(model: Any) -> None:
    """Take memory on a device that the model is not on, and keep it."""
    here = next(model.parameters()).device
    for elsewhere in other_devices(here)[:1]:
        _stray.append(torch.zeros(STRAY_BYTES, dtype=torch.uint8, device=elsewhere))


def _third_copy() -> Undo:
    """Merge as PEFT did before its pull request 1944: by a sum that is a new weight beside the old one."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            if safe_merge or self.lora_variant:
                real(self, safe_merge=safe_merge, adapter_names=adapter_names)
                return
            for name in adapter_names or self.active_adapters:
                delta = self.get_delta_weight(name)
                base = self.get_base_layer()
                base.weight.data = base.weight.data + delta
                self.merged_adapters.append(name)

        return merge

    from peft.tuners.lora.layer import Linear

    return replace(Linear, "merge", wrap)


FAULTS: dict[str, Install] = {
    "placed-elsewhere": _after_loading(_one_elsewhere),
    "bytes-elsewhere": _after_loading(_stray_bytes),
    "merge-third-copy": _third_copy,
}
