"""Soak of the stages `base`, `adapter` and `merged`: tensors in the device's memory, and every merge again."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from consistency.capture.names import (
    BIAS,
    DELTA,
    SAFE_BIAS,
    SAFE_WEIGHT,
    WEIGHT,
    adapter_place,
    module_place,
    split_name,
)
from consistency.case import standard
from consistency.numerics.identity import start_of
from consistency.stages.merged.forms.bias import bias_of
from consistency.stages.merged.worker import delta_weight
from consistency.worker.context import Context
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.merging import adapted_layers
from consistency.worker.model.merging import merged as merge
from consistency.worker.quantized.held import is_composite
from consistency.worker.soak.ledger import Again, Ledger


def base(context: Context, ledger: Ledger) -> Again:
    """Digest every tensor of the base again; one that the adapter's method rewrote is compared as it was after that."""

    def again() -> Iterator[None]:
        for name, tensor in context.base.on_device():
            layer, part = split_name(name)
            part = f"{part}_after_adapter" if name in context.rewritten else part
            ledger.see((standard.BASE, layer, part), tensor, expected=functools.partial(context.expected_base, name))
            yield

    return again


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


def merged(context: Context, ledger: Ledger) -> Again:
    """Merge every layer again."""

    def again() -> Iterator[None]:
        for name, layer in adapted_layers(context.model):
            place = module_place(name)
            with context.base.onload(layer):
                if ledger.knows((standard.MERGED, place, DELTA)):
                    with torch.no_grad():
                        ledger.see((standard.MERGED, place, DELTA), delta_weight(layer))
                for safe, tensor, beside in ((False, WEIGHT, BIAS), (True, SAFE_WEIGHT, SAFE_BIAS)):
                    if ledger.knows((standard.MERGED, place, tensor)):
                        with merge(layer, safe=safe) as weight:
                            ledger.see((standard.MERGED, place, tensor), weight)
                            bias = bias_of(layer)
                            if bias is not None:
                                ledger.see((standard.MERGED, place, beside), bias)
                        del weight
            yield

    return again
