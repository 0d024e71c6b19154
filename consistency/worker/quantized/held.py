"""The quantized weights of a model, as bitsandbytes and torchao hold them.

A layer's weight is then no tensor of numbers: bitsandbytes has codes in the parameter and the rest in attributes,
torchao a tensor of its own class that is made of several. Kinds that are not known here have no formula: their parts
are still compared, bit by bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from consistency.numerics.quantized import Affine, EightBit, Float8, FourBit, QuantizedWeight

STATE = ".quant_state.bitsandbytes__"
"""In a file, the start of the name of a 4-bit weight's record of settings, after the weight's own name."""


def is_quantized(weight: Any) -> bool:
    """Report whether a weight is quantized."""
    return is_composite(weight) or _is_of_bitsandbytes(weight)


def is_composite(weight: Any) -> bool:
    """Report whether a tensor has no elements of its own, as one of torchao: it is made of other tensors."""
    return isinstance(weight, torch.Tensor) and hasattr(type(weight), "__tensor_flatten__")


def _is_of_bitsandbytes(weight: Any) -> bool:
    return type(weight).__name__ in ("Params4bit", "Int8Params") and weight.dtype in (torch.uint8, torch.int8)


def quantized_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of every layer whose weight is quantized."""
    for name, module in model.named_modules():
        if is_quantized(module._parameters.get("weight")):
            yield name, module


def weight_of_layer(layer: Any) -> QuantizedWeight | None:
    """Return a layer's weight by its parts, on its device; None where the kind has no formula here."""
    weight = layer.weight
    kind = type(weight).__name__
    if kind == "Params4bit":
        return _four_bit(weight)
    if kind == "Int8Params":
        parts = {"codes": weight.data, "absmax": _row_scales(layer)}
        return EightBit(parts=parts, shape=tuple(weight.shape), dtype=torch.float32)
    if is_composite(weight) and weight.dim() == 2:
        return _of_torchao(weight)
    return None


def _row_scales(layer: Any) -> torch.Tensor:
    """Return the scales of an 8-bit layer, which its first pass moves from the weight to the layer."""
    scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
    assert isinstance(scales, torch.Tensor)
    return scales


def _four_bit(weight: Any) -> QuantizedWeight | None:
    """Return a 4-bit weight of bitsandbytes by its parts; None of one that is packed for the CPU or has no formula."""
    state = weight.quant_state
    if getattr(state, "packing_format_for_cpu", False) or state.dtype is None:
        return None
    parts = {"codes": weight.data, "absmax": state.absmax, "table": state.code}
    if state.nested:  # the scales are quantized too, and the formula is for blocks of the library's usual size
        if state.state2.blocksize != 256:
            return None
        parts |= {"nested_absmax": state.state2.absmax, "nested_table": state.state2.code, "offset": state.offset}
    return FourBit(parts=parts, shape=tuple(state.shape), dtype=state.dtype, block=state.blocksize)


def _of_torchao(weight: Any) -> QuantizedWeight | None:
    """Return a weight of torchao by its parts; None where its kind has no formula here."""
    kind, block = type(weight).__name__, tuple(getattr(weight, "block_size", None) or ())
    parts = dict(inner_tensors(weight))
    if len(block) != weight.dim() or getattr(weight, "act_pre_scale", None) is not None:
        return None
    shape, dtype = tuple(weight.shape), weight.dtype
    if kind == "Float8Tensor":
        return Float8(parts=parts, shape=shape, dtype=dtype, block=block)
    target_dtypes = {"Int8Tensor": "int8", "IntxUnpackedToInt8Tensor": str(getattr(weight, "target_dtype", ""))}
    target_dtype = target_dtypes.get(kind, "")
    digits = "".join(letter for letter in target_dtype if letter.isdigit())
    if not digits or "uint" in target_dtype:
        return None
    highest = 2 ** (int(digits) - 1) - 1
    return Affine(parts=parts, shape=shape, dtype=dtype, block=block, lowest=-highest - 1, highest=highest)


def inner_tensors(weight: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a composite one is made of, by their attributes."""
    for name in weight.__tensor_flatten__()[0]:
        inner = getattr(weight, name)
        if is_composite(inner):
            for part, tensor in inner_tensors(inner):
                yield f"{name}_{part}", tensor
        elif isinstance(inner, torch.Tensor):
            yield name, inner


def stored_names(name: str, weight: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield each tensor that stores a quantized weight: its name in the model, in the file, and the tensor.

    Parameters
    ----------
    name : str
        Name of the weight in the model, such as `q_proj.weight`; a part of it is called `q_proj.weight_absmax`.
    """
    if is_composite(weight):
        layer, _, parameter = name.rpartition(".")
        prefix = f"{layer}." if layer else ""
        for part, tensor in inner_tensors(weight):
            yield f"{name}_{part}", f"{prefix}_{parameter}_{part}", tensor
        return
    yield name, name, weight
    if type(weight).__name__ == "Int8Params":
        layer = name.rpartition(".")[0]
        if weight.SCB is not None:
            yield f"{layer}.SCB", f"{layer}.SCB", weight.SCB
        return
    state = weight.quant_state
    parts = {"absmax": state.absmax, "quant_map": state.code}
    if state.nested:
        parts |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
    for part, tensor in parts.items():
        yield f"{name}_{part}", f"{name}.{part}", tensor


def stated_settings(weight: Any) -> dict[str, Any]:
    """Return the settings of a 4-bit weight in the model, as a file's record would state them; empty of other kinds."""
    if type(weight).__name__ != "Params4bit":
        return {}
    packed = weight.quant_state.as_dict(packed=True)
    for key, part in packed.items():
        if key.startswith(STATE[1:]):
            return settings_in(part)
    return {}


def settings_in(record: torch.Tensor) -> dict[str, Any]:
    """Return the settings in a file's record, by name."""
    settings = json.loads(bytes(record.cpu().numpy()).decode())
    return settings if isinstance(settings, dict) else {}


def dequantized(layer: Any) -> torch.Tensor:
    """Return a layer's weight as its library dequantizes it, on its device."""
    if is_composite(layer.weight):
        values = layer.weight.dequantize()
    else:
        from bitsandbytes import functional

        weight = layer.weight
        if type(weight).__name__ == "Params4bit":
            values = functional.dequantize_4bit(weight.data, weight.quant_state)
        else:
            values = functional.int8_vectorwise_dequant(weight.data, _row_scales(layer))
    assert isinstance(values, torch.Tensor)
    return values.detach()
