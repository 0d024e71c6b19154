"""The stage `gradient` again, as a soak repeats it."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.case import standard
from consistency.stages.gradient.worker import decisions_file, gradients_of
from consistency.worker import cpu_error
from consistency.worker.context import Context
from consistency.worker.decisions.replay import Replay
from consistency.worker.judging.again import inputs_again, is_moved
from consistency.worker.judging.gradients import backward_of, row_of
from consistency.worker.ledger import Again, Ledger
from consistency.worker.model import half_kernels
from consistency.worker.model.float64_reference import Reference
from consistency.worker.model.running import tokens_of
from consistency.worker.protocol import GRADIENT_FILE
from consistency.worker.training.backward import trained


def gradient(context: Context, ledger: Ledger) -> Again:
    """Return what computes the gradients again, by blocks, and shows them to the ledger."""
    inputs = inputs_again(context)
    backward = backward_of(context.model, trained(context.model, context.expected), inputs)
    kernels = half_kernels.replacement(context.model, tokens_of(inputs))
    moved = is_moved(context, inputs)
    path = context.scratch / GRADIENT_FILE
    reference = Reference.open_published(path) if path.exists() else None

    def again() -> Iterator[None]:
        if reference is not None:
            title = cpu_error.products_on(context.model, context.device)
            replay = Replay(decisions_file(context), context.model, title)
            with half_kernels.computing(kernels):
                gradients = gradients_of(backward, reference, replay)
            for name, value in gradients.items():
                ledger.see((standard.GRADIENT, *row_of(context, name)), value, own=moved)
        yield

    return again
