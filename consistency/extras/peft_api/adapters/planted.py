"""Faults in how several adapters of one model are switched, combined, merged, replaced and deleted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import changing, instead

_LAYER = "peft.tuners.tuners_utils:BaseTunerLayer"
_HOLDERS = (torch.nn.ModuleDict, torch.nn.ParameterDict)


def left_after_delete() -> Callable[[], None]:
    """Let one layer keep a parameter of an adapter that is deleted."""
    adapters_kept: list[str] = []

    @instead(f"{_LAYER}.delete_adapter")
    def delete(real: Callable[..., None], layer: Any, adapter: str) -> None:
        holders = [getattr(layer, name) for name in layer.adapter_layer_names]
        holders = [holder for holder in holders if isinstance(holder, _HOLDERS) and adapter in holder]
        if not holders or adapter in adapters_kept:
            real(layer, adapter)
            return
        holder = holders[-1]  # the last one: of LoRA, B
        parameter = holder[adapter]
        real(layer, adapter)
        adapters_kept.append(adapter)
        holder[adapter] = parameter

    return delete()


def stays_active() -> Callable[[], None]:
    """Let one layer keep the adapter that was active in it."""
    first: list[int] = []

    @instead(f"{_LAYER}.set_adapter")
    def set_adapter(real: Callable[..., None], layer: Any, adapters: Any, **options: Any) -> None:
        before = layer.active_adapters
        real(layer, adapters, **options)
        if before and before != layer.active_adapters and "default" not in before:
            first[:] = first or [id(layer)]
            if first == [id(layer)]:
                real(layer, before, **options)

    return set_adapter()


@instead("peft.tuners.lora.model:LoraModel.add_weighted_adapter")
def wrong_weights(
    real: Callable[..., None], model: Any, adapters: list[str], weights: list[float], *args: Any, **options: Any
) -> None:
    real(model, adapters, [weight * 1.001 for weight in weights], *args, **options)


@instead("torch:bernoulli")
def wrong_density(real: Callable[..., torch.Tensor], probability: torch.Tensor, **options: Any) -> torch.Tensor:
    """Keep what should be left out."""
    return real(1 - probability, **options)


@changing("peft.tuners.lora.model:LoraModel._svd_generalized_task_arithmetic_weighted_adapter")
def cut_short(factors: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Lose the smallest singular value that is kept."""
    factors[1][:, -1] = 0


@instead("peft.utils.hotswap:hotswap_adapter_from_state_dict")
def leaves_one(real: Callable[..., None], *, model: Any, state_dict: dict[str, Any], **options: Any) -> None:
    name = sorted(name for name in state_dict if "lora_B" in name)[1]
    parameter: torch.Tensor = model.get_parameter(name)
    before = parameter.detach().clone()
    real(model=model, state_dict=state_dict, **options)
    with torch.no_grad():
        parameter.copy_(before)


@instead("peft.tuners.lora.layer:Linear.unmerge")
def unmerge_off(real: Callable[..., None], layer: Any) -> None:
    """Take off more than was added: a little, but of a half type so much that rounding does not swallow it."""
    before = layer.get_base_layer().weight.detach().clone()
    real(layer)
    with torch.no_grad():
        weight = layer.get_base_layer().weight
        factor = 0.5 if weight.itemsize == 2 else 0.001
        weight += factor * (weight - before)
