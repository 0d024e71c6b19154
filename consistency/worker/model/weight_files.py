"""Read tensors of weight files on the CPU: a reference that shares no fault with a device."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from consistency.case.adapter_fit import endings
from consistency.case.budget.costs import WINDOW_BYTES
from consistency.case.checkpoint import Checkpoint, TensorHeader, read_checkpoint


class WeightFiles:
    """Tensors of a folder's weight files, read one at a time and memory-mapped.

    Unused pages are released: besides the tensors in use, `WINDOW_BYTES` stay resident. With `allow_pickle` a pickle is
    read, with `weights_only=True`, where there is no safetensors file.
    """

    def __init__(self, checkpoint: Checkpoint, *, allow_pickle: bool = False) -> None:
        self._checkpoint = checkpoint
        self._open: dict[Path, Any] = {}
        self._bytes_read: dict[Path, int] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        if checkpoint.pickled and allow_pickle:
            for file in checkpoint.files:
                # files from before torch 1.6 are not archives, and cannot be mapped
                is_mapped = zipfile.is_zipfile(file)
                self._loaded.update(torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped))

    @classmethod
    def of_base(cls, folder: str, *, allow_pickle: bool) -> WeightFiles:
        return cls._of(folder, "model", "pytorch_model", allow_pickle=allow_pickle)

    @classmethod
    def of_adapter(cls, folder: str, *, allow_pickle: bool) -> WeightFiles:
        return cls._of(folder, "adapter_model", "adapter_model", allow_pickle=allow_pickle)

    @classmethod
    def _of(cls, folder: str, stem: str, pickle_stem: str, *, allow_pickle: bool) -> WeightFiles:
        checkpoint = read_checkpoint(Path(folder), stem=stem, pickle_stem=pickle_stem, allow_pickle=allow_pickle)
        return cls(checkpoint, allow_pickle=allow_pickle)

    def mapped_anew(self) -> WeightFiles:
        """Return a reader with mappings of its own: what is written into its tensors reaches no other reader."""
        return WeightFiles(self._checkpoint, allow_pickle=bool(self._loaded))

    def names(self) -> Iterable[str]:
        return self._loaded or self._checkpoint.tensors

    def has(self, name: str) -> bool:
        return name in self._loaded or name in self._checkpoint.tensors

    def header(self, name: str) -> TensorHeader | None:
        return self._checkpoint.tensors.get(name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._loaded:
            return tuple(self._loaded[name].shape)
        return self._checkpoint.tensors[name].shape

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, in the file's own dtype."""
        if name in self._loaded:
            return self._loaded[name]
        file = self._checkpoint.tensors[name].file
        # a new mapping has no resident pages; tensors in use keep the previous one
        if file not in self._open or self._bytes_read[file] > WINDOW_BYTES:
            self._open[file] = safe_open(file, framework="pt", device="cpu")
            self._bytes_read[file] = 0
        tensor = self._open[file].get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        self._bytes_read[file] += tensor.nbytes
        return tensor

    def let_go(self) -> None:
        """Unmap the files: tensors in use keep their mapping, and those that are read later get another."""
        self._open.clear()

    def read_all(self) -> Mapping[str, torch.Tensor]:
        return {name: self.read(name) for name in self.names()}


def file_names(parameters: Mapping[str, torch.Tensor], files: WeightFiles) -> dict[str, str]:
    """Return the name in the files, by name in the model.

    The two differ by leading components where a checkpoint was saved from the bare model (`h.0.…` for
    `transformer.h.0.…`) or from a larger one. A name is matched only with a tensor of the same shape, and only where no
    other name matches; what transformers converts on loading (fused or split weights) stays unmatched.
    """
    available = set(files.names())
    matched = {name: name for name in parameters if name in available}
    free = available - set(matched.values())
    by_ending: dict[str, list[str]] = {}
    for name in free:
        for ending in endings(name):
            by_ending.setdefault(ending, []).append(name)
    claims: dict[str, list[str]] = {}
    for name, tensor in parameters.items():
        if name not in matched:
            # names in the file with the first ending that any of them has
            candidates = next((by_ending[ending] for ending in endings(name) if ending in by_ending), [])
            if len(candidates) == 1 and files.shape(candidates[0]) == tuple(tensor.shape):
                claims.setdefault(candidates[0], []).append(name)
    matched |= {names[0]: key for key, names in claims.items() if len(names) == 1}
    return {name: key for name, key in matched.items() if files.shape(key) == tuple(parameters[name].shape)}
