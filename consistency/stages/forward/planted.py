"""What the faults of the stage `forward` do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import (
    changing,
    factor_beyond_rounding,
    instead,
)
from consistency.worker.model.structure import blocks_of, parts_of

Tensors = dict[str, torch.Tensor]

_results = changing("consistency.stages.forward.worker:results_of")


@_results
def results_off(found: Tensors) -> Tensors:
    """Multiply what modules return by a factor that is some roundings of a half type."""
    for name, tensor in found.items():
        if "::input." not in name and tensor.is_floating_point():
            tensor *= factor_beyond_rounding(tensor.dtype, 1e-4)
    return found


@instead("consistency.stages.forward.worker:results_of")
def layer_zero(real: Callable[..., Tensors], model: torch.nn.Module, *given: Any) -> Tensors:
    """Let the first part of one layer return zeros for all rows but the first."""
    blocks = [*blocks_of(model).values()]
    block = blocks[len(blocks) // 2] if blocks else model
    parts = [part for name, part in parts_of(block).items() if not any(norm in name for norm in ("norm", "ln_"))]

    def zero(_: Any, __: Any, found: Any) -> Any:
        first = found[0] if isinstance(found, tuple) else found
        first[:, 1:] = 0
        return found

    hook = (parts or [block])[0].register_forward_hook(zero)
    try:
        return real(model, *given)
    finally:
        hook.remove()


@_results
def operator_fails(_: Tensors) -> Tensors:
    raise RuntimeError("an operator of this device failed")
