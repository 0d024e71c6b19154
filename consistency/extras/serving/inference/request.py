"""What an inference engine is asked: the metadata of the file that `consistency inputs` writes.

The file's tensors are the model's keyword arguments and nothing else, so that `--inputs` takes the same file.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from consistency.extras.serving.inference.identity import CaseKey

METADATA = "consistency"
"""The key in a safetensors file's metadata whose value is the JSON text."""

REQUEST_SCHEMA: Literal["consistency.inputs/1"] = "consistency.inputs/1"

Mode = Literal["adapter_on", "adapter_off", "adapter_merged"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""The modes, as the stage `forward` names them."""

OUTPUT: Literal["logits"] = "logits"
"""The model's output that is compared."""

_SIZES = (1, 2, 3, 5, 8, 16)
"""Sizes of batches: kernels are chosen by powers of two, and split odd sizes elsewhere."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs that an engine is asked for."""

    schema: Literal["consistency.inputs/1"]
    case: CaseKey
    base: str
    adapter: str | None
    """`base`, `adapter`: where the files were when the inputs were written; `adapter` is None where there is none."""
    output: Literal["logits"]
    modes: tuple[Mode, ...]
    """Modes that are wanted: without an adapter `adapter_off` alone."""
    batches: tuple[int, ...]
    """Sizes of the batches in which the first row is wanted, at the first and at the last place."""


def batches_of(rows: int) -> tuple[int, ...]:
    """Return the sizes of batches that so many rows can fill."""
    return tuple(size for size in _SIZES if size <= rows)
