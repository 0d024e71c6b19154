"""The stage `forward` again, as a soak repeats it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from consistency.capture.names import ADAPTER_MERGED, ADAPTER_OFF, ADAPTER_ON, END_TO_END
from consistency.case import standard
from consistency.stages.forward.long_text import row_of_long, rows_on_device
from consistency.stages.forward.modes import in_mode
from consistency.stages.forward.worker import by_blocks, row_of
from consistency.worker.context import Context
from consistency.worker.judging.again import inputs_again, is_moved
from consistency.worker.judging.long_text import long_mode, long_text
from consistency.worker.ledger import Again, Ledger
from consistency.worker.model import half_kernels
from consistency.worker.model.float64_reference import Reference
from consistency.worker.model.running import activations, tokens_of
from consistency.worker.protocol import REFERENCE_FILE


def forward(context: Context, ledger: Ledger) -> Again:
    """Return what runs the model again in every mode in which it ran, from end to end and by blocks."""
    inputs = inputs_again(context)
    moved = is_moved(context, inputs)
    kernels = half_kernels.replacement(context.model, tokens_of(inputs))
    all_modes = (ADAPTER_ON, ADAPTER_OFF, ADAPTER_MERGED)
    modes = [mode for mode in all_modes if ledger.has(standard.FORWARD, f"{mode}.{END_TO_END}")]
    path = context.scratch / REFERENCE_FILE
    reference = Reference.open_published(path) if path.exists() else None

    def again() -> Iterator[None]:
        for mode in modes:
            with half_kernels.computing(kernels):
                ends = in_mode(context.model, mode, functools.partial(activations, context.model, inputs))
            for name, tensor in ends.items():
                ledger.see((standard.FORWARD, name, f"{mode}.{END_TO_END}"), tensor, own=moved)
            if reference is not None and ledger.has(standard.FORWARD, mode):
                run_blocks = functools.partial(by_blocks, context, inputs, mode, reference)
                with half_kernels.computing(kernels):
                    results, _ = in_mode(context.model, mode, run_blocks)
                for name, result in results.items():
                    ledger.see((standard.FORWARD, *row_of(mode, name)), result, own=moved)
                del results  # before the next mode is computed
            yield
        if modes and reference is not None and ledger.has(standard.FORWARD, long_mode(modes[0])):
            _see_long_text(context, ledger, modes[0], reference)
            yield

    return again


def _see_long_text(context: Context, ledger: Ledger, mode: str, reference: Reference) -> None:
    """Compute the sampled rows of the long text again, in the mode in which they were compared."""
    text, _ = long_text(context)
    if text is None:
        return
    model, long = context.model, long_mode(mode)
    given = functools.partial(reference.given_value, long)
    with half_kernels.computing(half_kernels.replacement(model, text.tokens)):
        results = in_mode(model, mode, functools.partial(rows_on_device, model, text, given))
    for name, rows in results.items():
        ledger.see((standard.FORWARD, *row_of_long(long, name)), rows, own=False)
