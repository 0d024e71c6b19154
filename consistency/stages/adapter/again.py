"""The stage `adapter` again, as a soak repeats it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from consistency.capture.names import adapter_place
from consistency.case import standard
from consistency.numerics.identity import start_of
from consistency.worker.context import Context
from consistency.worker.ledger import Again, Ledger
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.quantized.held import is_composite


def adapter(context: Context, ledger: Ledger) -> Again:
    """Return what digests every tensor of the adapter again, and those that its method computed on loading."""

    def expected(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        if name not in context.expected:
            return None
        _, tensor = context.expected[name]
        return tensor.to(dtype)

    def again() -> Iterator[None]:
        base_addresses = context.base.addresses()
        for name, tensor in _tensors(context.model).items():
            # an offloaded tensor has no bytes here, and a composite one is a quantized weight of the base
            if tensor.is_meta or is_composite(tensor):
                continue
            if start_of(tensor) in base_addresses and name not in context.expected:
                continue  # of the base: its own stage digests it
            key = name.replace(f".{ADAPTER_NAME}", "")
            if name in context.expected:
                key, _ = context.expected[name]
            ledger.see(
                (standard.ADAPTER, *adapter_place(key)),
                tensor,
                expected=functools.partial(expected, name, tensor.dtype),
            )
            yield

    return again


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors of a model by name: parameters, buffers, and what else its state has."""
    tensors = dict(model.named_buffers())
    tensors |= model.state_dict(keep_vars=True)
    tensors |= dict(model.named_parameters())
    return tensors
