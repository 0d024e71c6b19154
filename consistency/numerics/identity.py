"""Tell which tensors share their memory: by their storages, not by addresses.

Not every backend has addresses: `data_ptr()` is 0 for each tensor of XLA, where an array has none before its graph has
run, and of the meta device. The object behind a storage is shared by all views of it, on every backend.
"""

from __future__ import annotations

import torch

Start = tuple[int, int, int]
"""Place where a tensor begins: its storage, and its offset in that, which XLA gives as an address alone."""


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors share if their memory is the same: unique as long as one of these tensors lives."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # a sparse tensor has no storage: the tensors that it is made of have
        return id(tensor)


def start_of(tensor: torch.Tensor) -> Start:
    """Return where a tensor begins in memory: equal for two tensors that begin at the same place, and for no others."""
    if tensor.layout is not torch.strided:
        return id(tensor), 0, 0
    return storage_of(tensor), int(tensor.storage_offset()) * tensor.itemsize, tensor.data_ptr()
