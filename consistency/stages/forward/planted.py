"""The planted faults of the stage `forward`, in what the blocks return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import changing, factor_beyond_rounding, instead
from consistency.worker.model.structure import blocks_of, parts_of

Tensors = dict[str, torch.Tensor]

_results = changing("consistency.stages.forward.worker:results_of")


@_results
def results_off(results: Tensors) -> Tensors:
    """Multiply what modules return by a factor that is some roundings of a half type."""
    for name, tensor in results.items():
        if "::input." not in name and tensor.is_floating_point():
            tensor *= factor_beyond_rounding(tensor.dtype, 1e-4)
    return results


@instead("consistency.stages.forward.worker:results_of")
def layer_zero(real: Callable[..., Tensors], model: torch.nn.Module, *args: Any) -> Tensors:
    """Let the first part of the middle block return zeros for all rows but the first."""
    blocks = [*blocks_of(model).values()]
    block = model
    if blocks:
        block = blocks[len(blocks) // 2]
    parts = [part for name, part in parts_of(block).items() if "norm" not in name and "ln_" not in name]

    def zero(_: Any, __: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        first[:, 1:] = 0
        return output

    hook = (parts or [block])[0].register_forward_hook(zero)
    try:
        return real(model, *args)
    finally:
        hook.remove()


@_results
def operator_fails(_: Tensors) -> Tensors:
    """Raise an error as an operator that the device lacks does."""
    raise RuntimeError("an operator of this device failed")
