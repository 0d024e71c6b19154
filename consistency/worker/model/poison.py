"""Fill memory with bits that no computation makes, so that a copy that never arrives cannot look right by chance."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

POISON = {1: 0x7F, 2: 0x7FCB, 4: 0x7FC0FFEE, 8: 0x7FF8C0FFEE15DEAD}
"""Bits of a NaN by size in bytes, in float8_e4m3fn, float8_e5m2 and every longer format; no computation makes these
payloads."""

# by size in bytes
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """Fill floating-point tensors with `POISON`."""
    with torch.no_grad():
        for tensor in tensors:
            data = tensor.data
            data.view(INTEGERS[data.element_size()]).fill_(POISON[data.element_size()])


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a buffer filled with `POISON`."""
    size = dtype.itemsize
    return torch.full(shape, POISON[size], dtype=INTEGERS[size], device=device).view(dtype)


@contextmanager
def as_it_was(model: torch.nn.Module, names: Container[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of these names; restore every parameter and buffer at the end, the objects and their bytes.

    `low_cpu_mem_usage=True` replaces the parameter objects.
    """
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name in names}
    storages = {name: tensor.data for name, tensor in state.items()}
    bytes_before = {name: tensor.detach().clone() for name, tensor in state.items()}
    objects_before = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    try:
        yield state
    finally:
        for module, parameters, buffers in objects_before:
            _put_back(module._parameters, parameters)
            _put_back(module._buffers, buffers)
        with torch.no_grad():
            for name, tensor in state.items():
                storages[name].copy_(bytes_before[name])
                tensor.data = storages[name]


def _put_back(table: dict[str, Any], before: dict[str, Any]) -> None:
    """Give a module's table the content that it had before; the table stays the same object."""
    table.clear()
    table.update(before)
