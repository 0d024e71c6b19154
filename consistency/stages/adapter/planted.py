"""Faults between the adapter's file and its parameters, and in the adapted model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.adapted_model import in_adapted_model, own_parameters
from consistency.worker.faults.planting import Install, changing, cut_to_tf32

Tensors = dict[str, torch.Tensor]


def _in_adapter_file(change: Callable[[Tensors], None], *, spared: int = 0) -> Install:
    """Change what PEFT reads from the adapter's file, after so many spared loads."""
    loads = 0

    @changing("peft.peft_model:load_peft_weights")
    def load(tensors: Tensors) -> Tensors:
        nonlocal loads
        loads += 1
        found = {name: tensor.clone() for name, tensor in tensors.items()}
        if loads > spared:
            change(found)
        return found

    return load


@_in_adapter_file
def zeros(tensors: Tensors) -> None:
    for name in [name for name in tensors if "lora_B" in name] or [_any_tensor(tensors)]:
        tensors[name].zero_()


@_in_adapter_file
def one_bit(tensors: Tensors) -> None:
    _flip(tensors, _any_tensor(tensors))


@_in_adapter_file
def one_bit_of_a(tensors: Tensors) -> None:
    _flip(tensors, _a_tensor(tensors, "lora_A"))


def _flip(tensors: Tensors, name: str) -> None:
    held = tensors[name]
    raw = held.reshape(-1).view(torch.uint8)
    raw[min(5, held.numel() - 1) * held.element_size() + max(0, held.element_size() - 2)] ^= 1 << 4


@_in_adapter_file
def other_tensor(tensors: Tensors) -> None:
    name, other = _of_one_shape(tensors)
    tensors[name].copy_(tensors[other])


@_in_adapter_file
def two_layers(tensors: Tensors) -> None:
    one, other = _of_one_shape(tensors)
    tensors[one], tensors[other] = tensors[other], tensors[one]


def _through(dtype: torch.dtype) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(dtype).to(tensors[name].dtype)

    return change


through_bfloat16 = _in_adapter_file(_through(torch.bfloat16))
through_float16 = _in_adapter_file(_through(torch.float16))


@_in_adapter_file
def through_tf32(tensors: Tensors) -> None:
    for name in tensors:
        tensors[name] = cut_to_tf32(tensors[name])


@_in_adapter_file
def not_a_number(tensors: Tensors) -> None:
    tensors[_any_tensor(tensors)].fill_(float("nan"))


@_in_adapter_file
def half_a_page(tensors: Tensors) -> None:
    raw = tensors[_any_tensor(tensors)].reshape(-1).view(torch.uint8)
    raw[: min(2048, raw.numel() // 2)] = 0xA5


@_in_adapter_file
def missing_key(tensors: Tensors) -> None:
    del tensors[_a_tensor(tensors)]


def _no_a(tensors: Tensors) -> None:
    del tensors[_a_tensor(tensors, "lora_A")]


no_a = _in_adapter_file(_no_a)
no_a_later = _in_adapter_file(_no_a, spared=1)


def _any_tensor(tensors: Tensors) -> str:
    """Return the second tensor of lora_B, or where the method has none of all that are not integers."""
    names = sorted(name for name in tensors if "lora_B" in name)
    names = names if len(names) > 1 else sorted(name for name in tensors if tensors[name].is_floating_point())
    return names[min(1, len(names) - 1)]


def _of_one_shape(tensors: Tensors) -> tuple[str, str]:
    """Return two tensors of the same shape, of lora_B where the method has it."""
    names = sorted(name for name in tensors if "lora_B" in name)
    names = names if len(names) > 1 else sorted(tensors)
    for one in (_any_tensor(tensors), *names):
        for other in names:
            if other != one and tensors[other].shape == tensors[one].shape:
                return one, other
    raise ValueError("no two tensors have the same shape")


def _a_tensor(tensors: Tensors, part: str = "lora_B") -> str:
    return sorted(name for name in tensors if part in name)[1]


@in_adapted_model
def old_bytes(model: Any) -> None:
    """Leave in a parameter what another tensor of the model left in memory, as a copy into recycled memory would."""
    own = own_parameters(model)
    parameter = model.get_parameter(next((name for name in own if "lora_B" in name), own[0]))
    held = max((p for name, p in model.named_parameters() if name not in own), key=lambda p: p.numel())
    parameter.copy_(held.reshape(-1)[: parameter.numel()].reshape(parameter.shape))


@in_adapted_model
def double_scaling(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = {name: 2 * value for name, value in module.scaling.items()}


@in_adapted_model
def inactive(model: Any) -> None:
    model.base_model.disable_adapter_layers()
