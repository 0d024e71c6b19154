"""Planted faults of the stage `operators`: kernels that are wrong, or fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import cut_to_tf32, instead

Compute = Callable[..., torch.Tensor]

_operator = instead("consistency.stages.operators.worker:compute")


@_operator
def softmax_off(real: Compute, operation: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Make the results of the softmax a thousandth too large."""
    result = real(operation, inputs)
    return result * (1 + 1e-3) if operation.name == "softmax" else result


@_operator
def products_in_tf32(real: Compute, operation: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Take the operands of products in TF32, as a library does by an unexpected default."""
    if operation.name == "matmul" and inputs[0].dtype == torch.float32:
        inputs = [cut_to_tf32(tensor) for tensor in inputs]
    return real(operation, inputs)


@_operator
def softmax_fails(real: Compute, operation: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    if operation.name == "softmax":
        raise RuntimeError("a kernel of this device failed")
    return real(operation, inputs)
