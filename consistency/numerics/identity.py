"""Which tensors are the same memory: by their storages, not by addresses.

Not every backend has addresses: `data_ptr()` is 0 for each tensor of XLA, where an array has none before its graph has
run, and of the meta device. The object behind a storage is shared by all views of it, on every backend.
"""

from __future__ import annotations

import torch

Start = tuple[int, int, int]
"""Where a tensor begins: its storage, and its place in that, which XLA tells as an address alone."""


def storage_of(tensor: torch.Tensor) -> int:
    """Return what the tensors that share their memory have in common, for as long as one of them lives."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # a sparse tensor has none: what it is made of has
        return id(tensor)


def start_of(tensor: torch.Tensor) -> Start:
    """Return where a tensor begins in memory: the same for two that begin there, and for no others."""
    if tensor.layout is not torch.strided:
        return id(tensor), 0, 0
    return storage_of(tensor), int(tensor.storage_offset()) * tensor.itemsize, tensor.data_ptr()
