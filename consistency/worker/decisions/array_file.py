"""Store arrays one after the other in a scratch file: a pass records them without knowing their size before."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import torch

from consistency.errors import CaptureError
from consistency.numerics.dtype import name_of, named


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The place of an array in a file; truth values are stored as bits."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class ArrayFile:
    """A file that grows by one array at a time, and can be read by other processes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = path.stat().st_size if path.exists() else 0

    def append(self, tensor: torch.Tensor) -> Part:
        """Write a tensor of any device, and return its place."""
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        is_bool = flat.dtype == torch.bool
        array = np.packbits(flat.numpy()) if is_bool else flat.view(torch.uint8).numpy()
        part = Part(offset=self._end, dtype=name_of(tensor.dtype), shape=tuple(tensor.shape))
        try:
            with self._path.open("ab") as file:
                self._end += file.write(array.data)
        except OSError as error:
            raise CaptureError("cannot write a scratch file", where=self._path, got=error) from error
        return part

    def read(self, part: Part) -> torch.Tensor:
        """Return a tensor on the CPU."""
        dtype, count = named(part.dtype), math.prod(part.shape)
        if not count:
            return torch.empty(part.shape, dtype=dtype)
        is_bool = dtype == torch.bool
        size = -(-count // 8) if is_bool else count * dtype.itemsize
        raw = np.fromfile(self._path, np.uint8, size, offset=part.offset)
        if is_bool:
            return torch.from_numpy(np.unpackbits(raw, count=count).astype(bool)).view(part.shape)
        return torch.from_numpy(raw).view(dtype).view(part.shape)

    def touch(self) -> None:
        """Let the file exist, also where no array was written."""
        self._path.touch()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
