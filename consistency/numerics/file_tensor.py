"""Tensors in a safetensors file that are read a part at a time.

A page of a mapped file stays resident once it is read, for as long as its mapping lives. So each part of a large tensor
is read through a mapping of its own, which goes with the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch.utils._python_dispatch import _disable_current_modes

from consistency.numerics import sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor in a safetensors file that is too large to be resident as a whole: it is read a part at a time."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def map(self) -> torch.Tensor:
        """Return the tensor, mapped from the file anew: pages that are read are resident while the result lives."""
        return _read(self.path, self.name)


Readable = torch.Tensor | FileTensor
"""A tensor in memory, or one in a file."""

Elements = Callable[[slice], torch.Tensor]
"""Return some elements of a flattened tensor."""


def read_tensor(path: Path, name: str) -> Readable:
    """Return a tensor of a file, mapped as a whole if it is no larger than a part."""
    tensor = _read(path, name)
    if tensor.numel() <= sizes.PART:
        return tensor
    return FileTensor(path=path, name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)


def _read(path: Path, name: str) -> torch.Tensor:
    """Return a tensor of a file, mapped; modes that watch or change operations do not see how it is made."""
    with _disable_current_modes(), safe_open(path, framework="pt", device="cpu") as file:
        tensor = file.get_tensor(name)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def mapped(tensor: Readable) -> torch.Tensor:
    """Return a tensor in memory as it is, and one in a file mapped: elements that are not read use no memory."""
    return tensor.map() if isinstance(tensor, FileTensor) else tensor.detach()


def elements_of(tensor: Readable) -> Elements:
    """Return a function that gives some elements of the flattened tensor, on the CPU or in its file."""
    if isinstance(tensor, FileTensor):
        return lambda part: tensor.map().view(-1)[part]
    flat = tensor.detach().reshape(-1)  # once: it copies what is not contiguous
    return lambda part: flat[part]


def parts_of(start: int, stop: int) -> Iterator[slice]:
    """Yield slices of at most `sizes.PART` elements that cover a range."""
    for first in range(start, stop, sizes.PART):
        yield slice(first, min(stop, first + sizes.PART))
