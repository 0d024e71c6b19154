"""Faults in what a device computes: the delta, the merge, the forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import changing, cut_to_tf32, instead

Tensors = dict[str, torch.Tensor]

_DELTA = "peft.tuners.lora.layer:Linear.get_delta_weight"
_delta = changing(_DELTA)
_activations = changing("consistency.worker.stages.forward:activations")
_calls = itertools.count(1)


@instead("peft.tuners.lora.layer:Linear.merge")
def one_bit_of_weight(real: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    real(layer, *args, **kwargs)
    with torch.no_grad():
        layer.get_base_layer().weight.view(torch.int32)[3, 5] ^= 1 << 27


@instead(_DELTA)
def products_in_tf32(real: Callable[..., torch.Tensor], layer: Any, adapter: str) -> torch.Tensor:
    """Let the delta's product run as on a unit that cuts its operands to TF32."""
    factors = [layer.lora_A[adapter].weight, layer.lora_B[adapter].weight]
    kept = [factor.data for factor in factors]
    for factor in factors:
        factor.data = cut_to_tf32(factor.data)
    try:
        return real(layer, adapter)
    finally:
        for factor, data in zip(factors, kept, strict=True):
            factor.data = data


zero_delta = _delta(torch.zeros_like)


@_delta
def delta_off(delta: torch.Tensor) -> torch.Tensor:
    return delta * 1.001


@_delta
def flaky_delta(delta: torch.Tensor) -> torch.Tensor:
    return delta * (1 + 2**-23 * (next(_calls) % 2))


@_delta
def kernel_fails(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a kernel of this device failed")


@_activations
def activations_off(found: Tensors) -> Tensors:
    return {name: tensor * (1 + 1e-4) for name, tensor in found.items()}


@_activations
def operator_fails(_: Tensors) -> Tensors:
    raise RuntimeError("an operator of this device failed")
