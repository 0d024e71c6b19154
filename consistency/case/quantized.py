"""Weights of a quantized base in the shape of its layers, from the headers of their files.

A quantized weight is stored as several tensors: codes, scales, tables. Their shapes are those of the storage. No torch
here; of the data only the small record is read in which bitsandbytes states the shape of a 4-bit weight.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from consistency.case.checkpoint import TensorHeader

_STATE = re.compile(r"^(?P<weight>.+)\.quant_state\.bitsandbytes__(?:nf4|fp4)$")
_FOUR_BIT_PART = re.compile(r"^(?P<weight>.+)\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)$")
_EIGHT_BIT_PART = re.compile(r"^(?P<layer>.+)\.(?:SCB|weight_format)$")
_CODES = re.compile(r"^(?P<layer>.+)\._(?P<parameter>[a-zA-Z0-9]+)_qdata$")
_TORCHAO_PART = re.compile(r"^(?P<layer>.+)\._(?P<parameter>[a-zA-Z0-9]+)_(?:qdata|scale|zero_point|act_\w+)$")

_ONE_ELEMENT_EACH = frozenset({"Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"})
"""Classes of torchao with one code per element of the weight; others pack several elements, each in its own way."""

_LARGEST_STATE = 4096
"""Bytes of a record that is read, at most; a record of bitsandbytes has some 200."""


def weights_of(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the headers with each quantized weight as one matrix of its own shape, without its scales and tables.

    Where nothing is quantized, they are the same. The dtype of a quantized weight is that of its codes; its shape is
    empty where it is not stated.
    """
    four_bit_shapes: dict[str, tuple[int, ...]] = {}
    codes: dict[str, TensorHeader] = {}
    for name, header in tensors.items():
        if (state := _STATE.match(name)) is not None:
            four_bit_shapes[state["weight"]] = _stated_shape(header)
        if (code := _CODES.match(name)) is not None:
            codes[f"{code['layer']}.{code['parameter']}"] = header
    weights: dict[str, TensorHeader] = {}
    for name, header in tensors.items():
        if _is_storage_part(name, tensors, four_bit_shapes, codes):
            continue
        weights[name] = header
        if name in four_bit_shapes:
            weights[name] = replace(header, shape=four_bit_shapes[name])
    for name, header in codes.items():
        has_own_shape = _stated_class(header.file, name) in _ONE_ELEMENT_EACH
        weights[name] = replace(header, name=name, shape=header.shape if has_own_shape else ())
    return weights


def _is_storage_part(
    name: str, tensors: Mapping[str, TensorHeader], four_bit: Collection[str], codes: Collection[str]
) -> bool:
    """Report whether a tensor belongs to the storage of a quantized weight and is no weight itself.

    `four_bit` has the names of bitsandbytes' 4-bit weights, `codes` those of torchao's weights.
    """
    match = _FOUR_BIT_PART.match(name)
    if match is not None and match["weight"] in four_bit:
        return True
    match = _EIGHT_BIT_PART.match(name)
    if match is not None:
        weight = tensors.get(f"{match['layer']}.weight")
        if weight is not None and weight.dtype == "I8":
            return True
    match = _TORCHAO_PART.match(name)
    return match is not None and f"{match['layer']}.{match['parameter']}" in codes


def states_settings(name: str) -> bool:
    """Report whether a tensor of a file is a record of settings, which no layer holds as a tensor."""
    return _STATE.match(name) is not None or name.endswith(".weight_format")


def _stated_shape(header: TensorHeader) -> tuple[int, ...]:
    """Return the shape that a record of bitsandbytes states; nothing where it is damaged, which loading reports."""
    if math.prod(header.shape) > _LARGEST_STATE:
        return ()
    try:
        with safe_open(header.file, framework="numpy") as file:
            record = _read_object(bytes(file.get_tensor(header.name)))
    except (SafetensorError, OSError):
        return ()
    shape = record.get("shape")
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        return ()
    return tuple(shape)


def _stated_class(file: Path, weight: str) -> str:
    """Return the class that torchao states for a weight in the metadata of its file; empty where it states none."""
    text = _metadata(file, file.stat().st_mtime_ns).get(weight, "")
    return str(_read_object(text.encode()).get("_type", ""))


@functools.lru_cache(maxsize=64)
def _metadata(file: Path, changed: int) -> dict[str, str]:  # noqa: ARG001 - a file that changed is read again
    """Return the metadata of a safetensors file; `changed` is the time of its last change."""
    try:
        with safe_open(file, framework="numpy") as opened:
            return dict(opened.metadata() or {})
    except (SafetensorError, OSError):
        return {}


def _read_object(text: bytes) -> dict[str, Any]:
    """Return a JSON object; empty where the text is none."""
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
