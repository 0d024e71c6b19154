"""Remarks on an adapter whose tensors torch has read, as a run and a check of a merged folder have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from consistency.capture.adapter_remarks import AdapterRemark
from consistency.numerics.dtype import name_of
from consistency.worker.model.saved_adapter.contents import RawTensor, read_contents
from consistency.worker.model.saved_adapter.remarks import remarks_on_config, remarks_on_values


def remarks_on(
    tensors: Iterable[tuple[str, torch.Tensor]], config: Mapping[str, Any] | None = None
) -> list[AdapterRemark]:
    """Return what shows in an adapter's tensors, by their keys in its file, and what its config says otherwise.

    Where no layer adds anything, it is said elsewhere: the adapter has no effect. What file and config say differently
    is a warning here, since the rows of a run, or of a merged folder, judge what came of it; what may be meant is left
    to `consistency check-adapter`.

    Parameters
    ----------
    tensors : iterable of (str, torch.Tensor)
        Keys and tensors, on the CPU. Each tensor is read once.
    config : mapping, optional
        The table of adapter_config.json; without it nothing is said of it.
    """
    contents = read_contents(_raw(key, tensor) for key, tensor in tensors)
    remarks = remarks_on_values(contents, says_all=False)
    if config is not None:
        keys = [tensor.key for tensor in contents]
        mismatches = [remark for remark in remarks_on_config(config, contents, keys) if remark.is_error]
        remarks += [dataclasses.replace(remark, is_error=False) for remark in mismatches]
    return remarks


def _raw(key: str, tensor: torch.Tensor) -> RawTensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return RawTensor(
        key=key, shape=tuple(tensor.shape), dtype=name_of(tensor.dtype), raw=flat.view(torch.uint8).numpy()
    )
