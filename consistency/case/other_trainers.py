"""Recognise adapters of other trainers by the names in their files, and say how they become PEFT's. No torch here."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LARGEST_HEADER = 100_000_000  # bytes; safetensors refuses a larger one


@dataclass(frozen=True, slots=True)
class _Trainer:
    """A layout of factors: what its keys look like, what wrote it, and what makes it PEFT's."""

    key: re.Pattern[str]
    what: str
    todo: str


_TRAINERS = (
    _Trainer(
        re.compile(r"\.lora_(?:down|up)\.weight$"),
        "a LoRA of kohya's scripts",
        "convert it: lora_down is PEFT's lora_A and lora_up its lora_B, of the same shapes; r is the number of rows of "
        "lora_down and lora_alpha the tensor .alpha of the layer. Write them as adapter_model.safetensors beside an "
        "adapter_config.json; of a model of diffusers, pipeline.load_lora_weights() reads the file as it is",
    ),
    _Trainer(
        re.compile(r"\.lora_[ab]$"),
        "a LoRA of MLX",
        "convert it: PEFT's lora_A is lora_a transposed and its lora_B lora_b transposed; r is the number of columns "
        "of lora_a, and lora_alpha is r times the scale of MLX's adapter_config.json",
    ),
    _Trainer(
        re.compile(r"^(?:unet|transformer|text_encoder(?:_2)?)\..*(?:lora_[AB]|lora\.(?:down|up))\.weight$"),
        "a LoRA of diffusers",
        "load it by pipeline.load_lora_weights(), and save the adapter of each model by its save_pretrained(); check "
        "that with --base python:package.module:function",
    ),
)


def adapter_of_another_trainer(folder: Path) -> tuple[str, str] | None:
    """Return what wrote the adapter in a folder, or in a file, and how it is converted; None where PEFT may have."""
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]:
        keys = _keys(file)
        for trainer in _TRAINERS:
            if keys and any(trainer.key.search(key) for key in keys):
                return f"{trainer.what} ({file.name}), not an adapter of PEFT", trainer.todo
    return None


def _keys(file: Path) -> Collection[str]:
    """Return the names in a safetensors header; none where it cannot be read, which another reader says."""
    with suppress(OSError, ValueError, struct.error, RecursionError), file.open("rb") as content:
        (length,) = struct.unpack("<Q", content.read(8))
        if length <= _LARGEST_HEADER:
            table = json.loads(content.read(length))
            return [key for key in table if key != "__metadata__"] if isinstance(table, dict) else ()
    return ()
