"""Soak of the stages `forward` and `gradient`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from consistency.capture.names import ADAPTER_MERGED, ADAPTER_OFF, ADAPTER_ON, END_TO_END
from consistency.case import standard
from consistency.stages.forward.worker import by_blocks, in_mode, row_of
from consistency.stages.gradient.worker import decisions_file, gradients_of
from consistency.worker import cpu_error
from consistency.worker.context import Context
from consistency.worker.decisions.replay import Replay
from consistency.worker.judging.gradients import backward_of
from consistency.worker.judging.gradients import row_of as row_of_gradient
from consistency.worker.model import half_kernels
from consistency.worker.model.float64_reference import Reference
from consistency.worker.model.inputs import fixed_inputs
from consistency.worker.model.running import activations, tokens_of
from consistency.worker.protocol import GRADIENT_FILE, REFERENCE_FILE
from consistency.worker.soak.ledger import Again, Ledger
from consistency.worker.training.backward import trained


def forward(context: Context, ledger: Ledger) -> Again:
    """Run the model again in every mode in which it ran, from end to end and by blocks."""
    inputs = _inputs(context)
    moved = _is_moved(context, inputs)
    kernels = half_kernels.replacement(context.model, tokens_of(inputs))
    modes = [
        mode
        for mode in (ADAPTER_ON, ADAPTER_OFF, ADAPTER_MERGED)
        if ledger.has(standard.FORWARD, f"{mode}.{END_TO_END}")
    ]
    path = context.scratch / REFERENCE_FILE
    reference = Reference.of(path) if path.exists() else None

    def again() -> Iterator[None]:
        for mode in modes:
            with half_kernels.computing(kernels):
                ends = in_mode(context.model, mode, functools.partial(activations, context.model, inputs))
            for name, tensor in ends.items():
                ledger.see((standard.FORWARD, name, f"{mode}.{END_TO_END}"), tensor, own=moved)
            if reference is not None and ledger.has(standard.FORWARD, mode):
                with half_kernels.computing(kernels):
                    results, _ = in_mode(
                        context.model, mode, functools.partial(by_blocks, context, inputs, mode, reference)
                    )
                for name, result in results.items():
                    ledger.see((standard.FORWARD, *row_of(mode, name)), result, own=moved)
                del results
            yield

    return again


def gradient(context: Context, ledger: Ledger) -> Again:
    """Compute the gradients again, by blocks."""
    inputs = _inputs(context)
    of = backward_of(context.model, trained(context.model, context.expected), inputs)
    kernels = half_kernels.replacement(context.model, tokens_of(inputs))
    moved = _is_moved(context, inputs)
    path = context.scratch / GRADIENT_FILE
    reference = Reference.of(path) if path.exists() else None

    def again() -> Iterator[None]:
        if reference is not None:
            title = cpu_error.products_on(context.model, context.device)
            with half_kernels.computing(kernels):
                found = gradients_of(of, reference, Replay(decisions_file(context), context.model, title))
            for name, gradient in found.items():
                ledger.see((standard.GRADIENT, *row_of_gradient(context, name)), gradient, own=moved)
        yield

    return again


def _is_moved(context: Context, inputs: dict[str, torch.Tensor]) -> bool:
    """Report whether inputs may be aligned otherwise than in the first run, which matters on the CPU alone."""
    return context.device.type == "cpu" and any(tensor.is_floating_point() for tensor in inputs.values())


def _inputs(context: Context) -> dict[str, torch.Tensor]:
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    if inputs is None:  # then the first run has compared nothing
        raise ValueError(reason)
    return inputs
