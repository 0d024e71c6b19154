"""A second adapter for the drill: the first one's tensors in reverse, so that no tensor of one is in the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from consistency.capture.claim import scratch_folder
from consistency.case.builtin import BUILTIN_CASES, builtin_folder
from consistency.case.named_adapters import NamedAdapter

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_OF_LAYERS = "base_model.model."
_HEADER_SIZE = 8
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Per element, of the dtypes that are reversed: an integer is an index, and has to stay one."""


@contextmanager
def several_adapters(first: Path | None = None) -> Iterator[tuple[NamedAdapter, ...] | None]:
    """Yield an adapter and a second one, which exists for as long as a `with` block takes.

    Without an argument the first is that of the first built-in case. None where its weights are in no safetensors file.
    """
    first = first or builtin_folder(BUILTIN_CASES[0]) / "adapter"
    if not (first / _WEIGHTS).is_file():
        yield None
        return
    with scratch_folder("second-adapter") as scratch:
        second = second_adapter(first, scratch / "second")
        yield NamedAdapter(name="first", path=str(first)), NamedAdapter(name="second", path=str(second))


def second_adapter(first: Path, folder: Path) -> Path:
    """Write a second adapter to a folder, which is made, and return that."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(first / _CONFIG, folder / _CONFIG)
    data = bytearray((first / _WEIGHTS).read_bytes())
    start = _HEADER_SIZE + int.from_bytes(data[:_HEADER_SIZE], "little")
    tensors = json.loads(data[_HEADER_SIZE:start])
    # what methods as VeRA share between layers has to be the same in all adapters of a model
    own = [name for name in tensors if name.startswith(_OF_LAYERS)] or list(tensors)
    for name, held in tensors.items():
        if name in own and (size := _BYTES.get(held.get("dtype"))):
            begin, end = held["data_offsets"]
            tensor = np.frombuffer(data, dtype=f"u{size}", count=(end - begin) // size, offset=start + begin)
            tensor[:] = tensor[::-1].copy()
    (folder / _WEIGHTS).write_bytes(data)
    return folder
