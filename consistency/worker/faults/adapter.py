"""Faults on the way from the adapter's file to its parameters, and in the adapted model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, Undo, cut_to_tf32, replace

Tensors = dict[str, torch.Tensor]


def _in_adapter_file(change: Callable[[Tensors], None]) -> Install:
    """Change what PEFT reads from the adapter's file, on its way to the device."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Tensors]:
        def load(*args: Any, **kwargs: Any) -> Tensors:
            found: Tensors = {name: tensor.clone() for name, tensor in real(*args, **kwargs).items()}
            change(found)
            return found

        return load

    def install() -> Undo:
        from peft import peft_model

        return replace(peft_model, "load_peft_weights", wrap)

    return install


def in_adapted_model(change: Callable[[Any], None]) -> Install:
    """Change the adapted model after PEFT has loaded it."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            model = real(*args, **kwargs)
            change(model)
            return model

        return load

    def install() -> Undo:
        from peft import PeftModel

        return replace(PeftModel, "from_pretrained", wrap)

    return install


def _in_later_loads(change: Callable[[Tensors], None]) -> Install:
    """Change what PEFT reads from the adapter's file, the first time apart."""
    loads = 0

    def later(tensors: Tensors) -> None:
        nonlocal loads
        loads += 1
        if loads > 1:
            change(tensors)

    return _in_adapter_file(later)


def _zeros(tensors: Tensors) -> None:
    for name in tensors:
        if "lora_B" in name:
            tensors[name].zero_()


def _one_bit(tensors: Tensors) -> None:
    _flip(tensors, _a_tensor(tensors))


def _one_bit_of_a(tensors: Tensors) -> None:
    _flip(tensors, _a_tensor(tensors, "lora_A"))


def _flip(tensors: Tensors, name: str) -> None:
    tensors[name].reshape(-1).view(torch.int32)[5] ^= 1 << 20


def _other_tensor(tensors: Tensors) -> None:
    name = _a_tensor(tensors)
    other = next(n for n in tensors if n != name and tensors[n].shape == tensors[name].shape and "lora_B" in n)
    tensors[name].copy_(tensors[other])


def _two_layers(tensors: Tensors) -> None:
    one = _a_tensor(tensors)
    other = next(n for n in tensors if n != one and tensors[n].shape == tensors[one].shape and "lora_B" in n)
    tensors[one], tensors[other] = tensors[other], tensors[one]


def _through(dtype: torch.dtype) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(dtype).to(tensors[name].dtype)

    return change


def _through_tf32(tensors: Tensors) -> None:
    for name in tensors:
        tensors[name] = cut_to_tf32(tensors[name])


def _not_a_number(tensors: Tensors) -> None:
    tensors[_a_tensor(tensors)].fill_(float("nan"))


def _half_a_page(tensors: Tensors) -> None:
    raw = tensors[_a_tensor(tensors)].reshape(-1).view(torch.uint8)
    raw[: min(2048, raw.numel() // 2)] = 0xA5


def _missing_key(tensors: Tensors) -> None:
    del tensors[_a_tensor(tensors)]


def _no_a(tensors: Tensors) -> None:
    del tensors[_a_tensor(tensors, "lora_A")]


def _a_tensor(tensors: Tensors, part: str = "lora_B") -> str:
    return sorted(name for name in tensors if part in name)[1]


def _old_bytes(model: Any) -> None:
    """Leave in a parameter what another tensor of the model left in memory, as a copy into recycled memory would."""
    parameter = next(p for name, p in model.named_parameters() if "lora_B" in name)
    held = max((p for name, p in model.named_parameters() if "lora_" not in name), key=lambda p: p.numel())
    with torch.no_grad():
        parameter.copy_(held.reshape(-1)[: parameter.numel()].reshape(parameter.shape))


def _double_scaling(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = {name: 2 * value for name, value in module.scaling.items()}


def _inactive(model: Any) -> None:
    model.base_model.disable_adapter_layers()


FAULTS: dict[str, Install] = {
    "adapter-zeros": _in_adapter_file(_zeros),
    "adapter-bit-flip": _in_adapter_file(_one_bit),
    "adapter-other-tensor": _in_adapter_file(_other_tensor),
    "adapter-bit-flip-in-a": _in_adapter_file(_one_bit_of_a),
    "adapter-layers-swapped": _in_adapter_file(_two_layers),
    "adapter-through-bfloat16": _in_adapter_file(_through(torch.bfloat16)),
    "adapter-through-float16": _in_adapter_file(_through(torch.float16)),
    "adapter-through-tf32": _in_adapter_file(_through_tf32),
    "adapter-copy-dropped": _in_adapter_file(_no_a),
    "adapter-copy-dropped-later": _in_later_loads(_no_a),
    "adapter-old-bytes": in_adapted_model(_old_bytes),
    "adapter-nan": _in_adapter_file(_not_a_number),
    "adapter-half-a-page": _in_adapter_file(_half_a_page),
    "adapter-missing-key": _in_adapter_file(_missing_key),
    "adapter-inactive": in_adapted_model(_inactive),
    "adapter-wrong-scaling": in_adapted_model(_double_scaling),
}
