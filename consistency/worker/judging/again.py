"""The inputs with which a stage computes once more, and whether the CPU may round otherwise then."""

from __future__ import annotations

import torch

from consistency.worker.context import Context
from consistency.worker.model.inputs import fixed_inputs


def is_moved(context: Context, inputs: dict[str, torch.Tensor]) -> bool:
    """Report whether inputs may be aligned otherwise than in the first run, which matters on the CPU alone."""
    return context.device.type == "cpu" and any(tensor.is_floating_point() for tensor in inputs.values())


def inputs_again(context: Context) -> dict[str, torch.Tensor]:
    """Return the inputs of the first run."""
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    if inputs is None:  # then the first run has compared nothing
        raise ValueError(reason)
    return inputs
