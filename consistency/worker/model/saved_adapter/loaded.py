"""What is wrong with an adapter whose tensors torch has read: a run and a check of a merged folder hold them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from consistency.capture.adapter_remarks import AdapterRemark
from consistency.numerics.dtype import name_of
from consistency.worker.model.saved_adapter.contents import RawTensor, read_contents
from consistency.worker.model.saved_adapter.remarks import remarks_on_values


def remarks_on(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[AdapterRemark]:
    """Return what shows in an adapter's tensors, by their keys in its file.

    Where no layer adds anything, it is said elsewhere: the adapter has no effect.

    Parameters
    ----------
    tensors : iterable of (str, torch.Tensor)
        Keys and tensors, on the CPU. Each tensor is read once.
    """
    contents = read_contents(_raw(key, tensor) for key, tensor in tensors)
    return remarks_on_values(contents, says_all=False)


def _raw(key: str, tensor: torch.Tensor) -> RawTensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return RawTensor(
        key=key, shape=tuple(tensor.shape), dtype=name_of(tensor.dtype), raw=flat.view(torch.uint8).numpy()
    )
