"""How many bytes a model takes on a device, from the headers of its files and its config: no torch, no tensor data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from consistency.case.adapter_fit import read_adapter
from consistency.case.case import Case
from consistency.case.checkpoint import TensorHeader, read_checkpoint, read_json

_BITS = re.compile(r"^(?:F|BF|F8_|I|U|C)(\d+)")
_FACTOR = re.compile(r"^(?P<layer>.+)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.weight)?$")
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}

FIXED_BYTES = 128 << 20
"""Scratch that no model's size changes: three arrays of the digests' 16 MiB (`numerics/digest.py`), the matrix
library's workspace (`:4096:8` is 32 MiB), and the 48 MiB that the segments of an allocator may leave unused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Bytes of a model on its device.

    Attributes
    ----------
    base : int
        Every tensor of the base's files, in the dtype that the base is loaded in.
    adapter : int
        Every tensor of the adapter's files in float32, to which PEFT widens half types.
    largest : int
        The largest tensor of the base.
    working : int
        What the stages need besides: the merge of the largest adapted layer, activations, and `FIXED_BYTES`.
    """

    base: int
    adapter: int
    largest: int
    working: int

    @property
    def whole(self) -> int:
        return self.base + self.adapter + self.working


def item_bytes(dtype: str) -> float:
    """Return the size of one element by the name that a safetensors header has for its dtype: `BF16`, `F8_E4M3`."""
    if dtype.startswith("F8"):
        return 1
    found = _BITS.match(dtype)
    return int(found[1]) / 8 if found else 1  # BOOL


def model_size(case: Case) -> ModelSize | None:
    """Return the size of a case's model; None where no header tells it: a factory's model, and a pickle."""
    if case.factory is not None or not case.base:
        return None
    folder = Path(case.base)
    tensors = read_checkpoint(folder, stem="model", pickle_stem="pytorch_model", allow_pickle=case.allow_pickle).tensors
    if not tensors:
        return None
    config = read_json(folder / "config.json")
    width = _WIDTHS.get(case.dtype if case.dtype != "auto" else str(config.get("dtype") or config.get("torch_dtype")))
    sizes = [_bytes(header, width) for header in tensors.values()]
    adapter: Mapping[str, TensorHeader] = {}
    if case.adapter is not None:
        _, adapter = read_adapter(Path(case.adapter), allow_pickle=case.allow_pickle)
    adapted = _largest_adapted(adapter.values())
    width = width or 4
    return ModelSize(
        base=sum(sizes),
        adapter=sum(prod(header.shape) * 4 for header in adapter.values()),
        largest=max(sizes),
        working=FIXED_BYTES + _activations(case, config, width) + _merge_bytes(adapted, width),
    )


def _bytes(header: TensorHeader, width: int | None) -> int:
    """Return a tensor's bytes; `width` is that of floating-point elements, None as in the file."""
    floating = header.dtype.startswith(("F", "BF"))
    return int(prod(header.shape) * (width if floating and width is not None else item_bytes(header.dtype)))


def _largest_adapted(adapter: Iterable[TensorHeader]) -> int:
    """Return the elements of the largest weight that a pair of factors adapts."""
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    for header in adapter:
        found = _FACTOR.match(header.name)
        if found is not None and len(header.shape) == 2:
            sides.setdefault(found["layer"], {})[found["side"]] = header.shape
    return max((pair["A"][1] * pair["B"][0] for pair in sides.values() if len(pair) == 2), default=0)


def _merge_bytes(elements: int, width: int) -> int:
    """Return the peak of merging one layer: a copy of its weight, delta and scaled delta in float32, the result."""
    return elements * (2 * width + 2 * 4)


def _activations(case: Case, config: Mapping[str, Any], width: int) -> int:
    """Return what the stages hold of activations: all hidden states, one block's own, and logits with their gradient.

    Of one block, autograd keeps some 16 arrays as wide as the hidden states or the feed-forward layer, in float32
    where the model widens them.
    """
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert text is not None

    def count(*names: str) -> int:
        return next((value for value in map(text.get, names) if isinstance(value, int)), 0)

    tokens = case.plan.sequences * case.plan.tokens
    hidden, layers = count("hidden_size", "n_embd", "d_model"), count("num_hidden_layers", "n_layer", "num_layers")
    widest = max(count("intermediate_size", "n_inner", "d_ff"), 4 * hidden)
    return tokens * ((layers + 1) * hidden * width + 16 * widest * 4 + count("vocab_size") * (width + 2 * 4))
