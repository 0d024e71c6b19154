"""Write a safetensors file in slices, for tensors that together would not fit in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from consistency.errors import CaptureError
from consistency.numerics import sizes
from consistency.numerics.digest import as_bytes
from consistency.numerics.dtype import name_of
from consistency.numerics.file_tensor import Readable, read_tensor

_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class TensorFile:
    """A file of tensors whose shapes are known before their values.

    Parameters
    ----------
    layout : mapping of str to (torch.dtype, tuple of int)
        Dtype and shape by name. A slice is one index of the first dimension.
    of_another : bool
        Read the file that another process has written, instead of writing one.

    Attributes
    ----------
    written : set of str
        Names of the tensors of which anything was written.
    """

    def __init__(
        self, path: Path, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], *, of_another: bool = False
    ) -> None:
        self.path = path
        self._layout = layout
        self.written: set[str] = set()
        header: dict[str, object] = {}
        self._starts: dict[str, int] = {}
        end = 0
        for name, (dtype, shape) in layout.items():
            self._starts[name], end = end, end + math.prod(shape) * dtype.itemsize
            code = _CODES[name_of(dtype)]
            header[name] = {"dtype": code, "shape": shape, "data_offsets": [self._starts[name], end]}
        # the format: the header's length in 8 bytes, the header as JSON, and the tensors from a multiple of 8 on
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        if of_another:
            self._file = os.open(path, os.O_RDONLY)
            self.written.update(layout)
            return
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._write(len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(self._file, self._data + end)

    def write(self, name: str, index: int, tensor: torch.Tensor) -> None:
        """Write one slice, a contiguous tensor on the CPU in the dtype of the layout."""
        self.write_elements(name, index * tensor.numel(), tensor)

    def write_elements(self, name: str, start: int, tensor: torch.Tensor) -> None:
        """Write some elements of a flattened tensor, from the number `start` on."""
        raw = as_bytes(tensor).numpy()
        self._write(raw.data, self._data + self._starts[name] + start * tensor.itemsize)
        self.written.add(name)

    def read(self, name: str) -> Readable | None:
        """Return a tensor, a large one mapped from the file; None for one that was never written."""
        if name not in self.written:
            return None
        dtype, shape = self._layout[name]
        elements = math.prod(shape)
        if elements > sizes.PART or not elements:
            return read_tensor(self.path, name)
        # a file of thousands of tensors has a header that takes longer to read than a tensor
        raw = bytearray(os.pread(self._file, elements * dtype.itemsize, self._data + self._starts[name]))
        return torch.frombuffer(raw, dtype=dtype).view(shape)

    def close(self, *, remove: bool = False) -> None:
        os.close(self._file)
        if remove:
            self.path.unlink(missing_ok=True)

    def _write(self, raw: bytes | memoryview, offset: int) -> None:
        remaining = memoryview(raw).cast("B")
        try:
            while remaining:  # the system may write less than it is asked to
                done = os.pwrite(self._file, remaining, offset)
                remaining, offset = remaining[done:], offset + done
        except OSError as error:
            raise CaptureError("cannot write a scratch file", where=self.path, got=error) from error
