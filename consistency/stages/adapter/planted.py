"""Planted faults between the adapter's file and its parameters, and in the adapted model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.adapted_model import in_adapted_model, own_parameters
from consistency.worker.faults.planting import Install, changing, cut_to_tf32

Tensors = dict[str, torch.Tensor]


def _in_adapter_file(change: Callable[[Tensors], None], *, spared: int = 0) -> Install:
    """Change the tensors that PEFT reads from the adapter's file, in place; the first `spared` loads are left."""
    loads = 0

    @changing("peft.peft_model:load_peft_weights")
    def load(tensors: Tensors) -> Tensors:
        nonlocal loads
        loads += 1
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        if loads > spared:
            change(copies)
        return copies

    return load


@_in_adapter_file
def zeros(tensors: Tensors) -> None:
    names = [name for name in tensors if "lora_B" in name]
    for name in names or [_any_tensor(tensors)]:
        tensors[name].zero_()


@_in_adapter_file
def one_bit(tensors: Tensors) -> None:
    _flip(tensors, _any_tensor(tensors))


@_in_adapter_file
def one_bit_of_a(tensors: Tensors) -> None:
    _flip(tensors, _second_tensor(tensors, "lora_A"))


def _flip(tensors: Tensors, name: str) -> None:
    """Flip a bit of the sixth element, in the byte before its last."""
    tensor = tensors[name]
    raw = tensor.reshape(-1).view(torch.uint8)
    element_start = min(5, tensor.numel() - 1) * tensor.element_size()
    raw[element_start + max(0, tensor.element_size() - 2)] ^= 1 << 4


@_in_adapter_file
def other_tensor(tensors: Tensors) -> None:
    first, second = _two_of_a_shape(tensors)
    tensors[first].copy_(tensors[second])


@_in_adapter_file
def two_layers(tensors: Tensors) -> None:
    first, second = _two_of_a_shape(tensors)
    tensors[first], tensors[second] = tensors[second], tensors[first]


def _through(dtype: torch.dtype) -> Callable[[Tensors], None]:
    """Return a change that casts each tensor to a dtype and back."""

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
    del tensors[_second_tensor(tensors)]


def _no_a(tensors: Tensors) -> None:
    """Leave out one lora_A, so that PEFT does not write its parameter."""
    del tensors[_second_tensor(tensors, "lora_A")]


no_a = _in_adapter_file(_no_a)
# the first load is the model's; only the adapter's second load, over poison, misses the tensor
no_a_later = _in_adapter_file(_no_a, spared=1)


def _any_tensor(tensors: Tensors) -> str:
    """Return the name of the second tensor of lora_B, or, without two of these, of all floating-point tensors."""
    names = sorted(name for name in tensors if "lora_B" in name)
    if len(names) < 2:
        names = sorted(name for name in tensors if tensors[name].is_floating_point())
    return names[min(1, len(names) - 1)]


def _two_of_a_shape(tensors: Tensors) -> tuple[str, str]:
    """Return the names of two tensors of the same shape, of lora_B where the method has it."""
    names = sorted(name for name in tensors if "lora_B" in name)
    if len(names) < 2:
        names = sorted(tensors)
    for first in (_any_tensor(tensors), *names):
        for second in names:
            if second != first and tensors[second].shape == tensors[first].shape:
                return first, second
    raise ValueError("no two tensors have the same shape")


def _second_tensor(tensors: Tensors, part: str = "lora_B") -> str:
    """Return the name of the second tensor whose name has this part."""
    return sorted(name for name in tensors if part in name)[1]


@in_adapted_model
def old_bytes(model: Any) -> None:
    """Fill a parameter with the bytes of the base's largest tensor, as a dropped copy into recycled memory would."""
    adapter_names = own_parameters(model)
    parameter = model.get_parameter(next((name for name in adapter_names if "lora_B" in name), adapter_names[0]))
    base_parameters = (p for name, p in model.named_parameters() if name not in adapter_names)
    largest = max(base_parameters, key=lambda p: p.numel())
    parameter.copy_(largest.reshape(-1)[: parameter.numel()].reshape(parameter.shape))


@in_adapted_model
def double_scaling(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = {name: 2 * value for name, value in module.scaling.items()}


@in_adapted_model
def inactive(model: Any) -> None:
    model.base_model.disable_adapter_layers()
