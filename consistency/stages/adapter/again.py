"""The stage `adapter` again, in a soak."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from consistency.capture.names import (
    adapter_place,
)
from consistency.case import standard
from consistency.numerics.identity import start_of
from consistency.worker.context import Context
from consistency.worker.ledger import Again, Ledger
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.quantized.held import is_composite


def adapter(context: Context, ledger: Ledger) -> Again:
    """Digest every tensor of the adapter again, and those that its method computed when it was loaded."""

    def expected(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        return context.expected[name][1].to(dtype) if name in context.expected else None

    def again() -> Iterator[None]:
        of_base = context.base.addresses()
        for name, tensor in _tensors(context.model).items():
            if tensor.is_meta or is_composite(tensor):
                continue
            if start_of(tensor) in of_base and name not in context.expected:
                continue
            key = context.expected[name][0] if name in context.expected else name.replace(f".{ADAPTER_NAME}", "")
            ledger.see(
                (standard.ADAPTER, *adapter_place(key)),
                tensor,
                expected=functools.partial(expected, name, tensor.dtype),
            )
            yield

    return again


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_buffers()), **model.state_dict(keep_vars=True), **dict(model.named_parameters())}
