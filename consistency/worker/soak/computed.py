"""Soak of the stage `forward`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from consistency.capture.names import ADAPTER_MERGED, ADAPTER_OFF, ADAPTER_ON
from consistency.worker.model.inputs import fixed_inputs
from consistency.worker.model.merging import merging_inside
from consistency.worker.model.running import activations
from consistency.worker.soak.again import Again, Compare
from consistency.worker.stages.context import Context


def forward(context: Context, compare: Compare) -> Again:
    """Run the model again in every mode in which it ran.

    Merged, each layer is merged while it computes, so that the model stays as it is and no second copy of its weights
    is needed. A tied weight is merged in one of its places then, so that mode is compared with its own first repeat.
    """
    inputs = _inputs(context)
    # on the CPU, NumPy's floating-point inputs may be aligned otherwise than those of the first run
    moved = context.device.type == "cpu" and any(tensor.is_floating_point() for tensor in inputs.values())

    modes = [mode for mode in (ADAPTER_ON, ADAPTER_OFF, ADAPTER_MERGED) if compare.has(mode)]

    def again() -> Iterator[None]:
        model = context.model
        for mode in modes:
            with _state(model, mode) if context.job.case.adapter is not None else nullcontext():
                found = activations(model, inputs)
            for name, tensor in found.items():
                compare(name, mode, tensor, own=moved or mode == ADAPTER_MERGED)
            del found
            yield

    return again


def _inputs(context: Context) -> dict[str, torch.Tensor]:
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    if inputs is None:  # then the first run has compared nothing
        raise ValueError(reason)
    return inputs


def _state(model: Any, mode: str) -> AbstractContextManager[None]:
    if mode == ADAPTER_MERGED:
        return merging_inside(model)
    return model.disable_adapter() if mode == ADAPTER_OFF else nullcontext()
