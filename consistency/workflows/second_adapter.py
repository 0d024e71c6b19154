"""A second adapter for the drill: the first one's tensors in reverse, so that no tensor of one is in the other."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from consistency.case.builtin import BUILTIN_CASES, builtin_folder
from consistency.case.named_adapters import NamedAdapter

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


@contextmanager
def several_adapters() -> Iterator[tuple[NamedAdapter, ...]]:
    """Yield the first built-in case's adapter and a second one, which exists for as long as a `with` block takes."""
    first = builtin_folder(BUILTIN_CASES[0]) / "adapter"
    with tempfile.TemporaryDirectory(prefix="consistency-second-adapter-") as scratch:
        second = second_adapter(first, Path(scratch) / "second")
        yield NamedAdapter(name="first", path=str(first)), NamedAdapter(name="second", path=str(second))


def second_adapter(first: Path, folder: Path) -> Path:
    """Write a second adapter to a folder, which is made, and return that; the first is of dtypes that NumPy has."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(first / _CONFIG, folder / _CONFIG)
    tensors = {name: np.ascontiguousarray(np.flip(tensor)) for name, tensor in load_file(first / _WEIGHTS).items()}
    save_file(tensors, folder / _WEIGHTS)
    return folder
