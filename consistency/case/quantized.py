"""Weights of a quantized base as its layers have them, from the headers of what stores them.

A quantized weight is stored as several tensors: codes, scales, tables. Their shapes are those of the storage. No torch
here; of the data only the small record is read in which bitsandbytes states the shape of a 4-bit weight.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from consistency.case.checkpoint import TensorHeader

_STATE = re.compile(r"^(?P<weight>.+)\.quant_state\.bitsandbytes__(?:nf4|fp4)$")
_OF_FOUR_BITS = re.compile(r"^(?P<weight>.+)\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)$")
_OF_EIGHT_BITS = re.compile(r"^(?P<layer>.+)\.(?:SCB|weight_format)$")
_CODES = re.compile(r"^(?P<layer>.+)\._(?P<parameter>[a-zA-Z0-9]+)_qdata$")
_OF_TORCHAO = re.compile(r"^(?P<layer>.+)\._(?P<parameter>[a-zA-Z0-9]+)_(?:qdata|scale|zero_point|act_\w+)$")

_ONE_ELEMENT_EACH = frozenset({"Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"})
"""Kinds of torchao whose codes have one element each; others pack several, each in its own way."""

_LARGEST_STATE = 4096
"""Bytes; a record of bitsandbytes has some 200."""


def weights_of(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the headers with each quantized weight as one matrix of its own shape, without its scales and tables.

    Where nothing is quantized, they are the same. The dtype of a quantized weight is that of its codes; its shape is
    empty where it is not stated.
    """
    four_bit = {match["weight"]: _shape_in(header) for name, header in tensors.items() if (match := _STATE.match(name))}
    codes = {
        f"{match['layer']}.{match['parameter']}": header
        for name, header in tensors.items()
        if (match := _CODES.match(name))
    }
    found: dict[str, TensorHeader] = {}
    for name, header in tensors.items():
        four, eight, torchao = (pattern.match(name) for pattern in (_OF_FOUR_BITS, _OF_EIGHT_BITS, _OF_TORCHAO))
        if four is not None and four["weight"] in four_bit:
            continue
        if eight is not None and getattr(tensors.get(f"{eight['layer']}.weight"), "dtype", "") == "I8":
            continue
        if torchao is not None and f"{torchao['layer']}.{torchao['parameter']}" in codes:
            continue
        found[name] = replace(header, shape=four_bit[name]) if name in four_bit else header
    for weight, header in codes.items():
        whole = _kind_in(header.file, weight) in _ONE_ELEMENT_EACH
        found[weight] = replace(header, name=weight, shape=header.shape if whole else ())
    return found


def states_settings(name: str) -> bool:
    """Report whether a tensor of a file is a record of settings, which no layer holds as a tensor."""
    return _STATE.match(name) is not None or name.endswith(".weight_format")


def _shape_in(header: TensorHeader) -> tuple[int, ...]:
    """Return the shape that a record of bitsandbytes states; nothing where it is damaged, which loading reports."""
    if math.prod(header.shape) > _LARGEST_STATE:
        return ()
    try:
        with safe_open(header.file, framework="numpy") as file:
            stated = _table(bytes(file.get_tensor(header.name)))
    except (SafetensorError, OSError):
        return ()
    shape = stated.get("shape")
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        return ()
    return tuple(shape)


def _kind_in(file: Path, weight: str) -> str:
    """Return the class that torchao states for a weight in the metadata of its file."""
    return str(_table(_metadata(file, file.stat().st_mtime_ns).get(weight, "").encode()).get("_type", ""))


@functools.lru_cache(maxsize=64)
def _metadata(file: Path, changed: int) -> dict[str, str]:  # noqa: ARG001 - a file that changed is read again
    try:
        with safe_open(file, framework="numpy") as opened:
            return dict(opened.metadata() or {})
    except (SafetensorError, OSError):
        return {}


def _table(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
