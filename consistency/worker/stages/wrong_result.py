"""Compute the first wrong result of a stage again, and keep the calls that make it, for a reproducer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch

from consistency.capture.names import COMPUTED_AGAIN, NOT_RECOMPUTED
from consistency.errors import first_line
from consistency.numerics.real import Real
from consistency.worker.model.call_trace import NotTracedError, Saw, kept_parts, trace_module
from consistency.worker.precision import products_of
from consistency.worker.recorder import Kept, TraceWrong
from consistency.worker.stages.context import Context


def computed_again(
    context: Context,
    names: Mapping[tuple[str, str], str],
    run: Callable[[Saw], None],
    computing: Callable[[], AbstractContextManager[None]],
) -> TraceWrong:
    """Return what traces a result that blocks make, by running the pass again.

    Parameters
    ----------
    names : mapping
        Of the results in the pass, by layer and tensor.
    computing : callable
        Gives what computes on this device in place of slow kernels.
    """

    def trace(layer: str, tensor: str, share: Callable[[torch.Tensor], float]) -> Kept | None:
        if (layer, tensor) not in names:
            return None
        context.events.step(f"{layer}, computed again", 0, 1)
        products = products_of(context.device)
        try:
            with torch.no_grad(), computing():
                traced = trace_module(context.model, layer, names[layer, tensor], context.device, run)
                parts, again = kept_parts(traced, context.device, products, share)
        except NotTracedError as error:
            return {}, {NOT_RECOMPUTED: str(error)}
        except Exception as error:  # model code of any kind may raise anything, and what is found is found
            return {}, {NOT_RECOMPUTED: first_line(error)}
        return parts, {COMPUTED_AGAIN: Real(again)}

    return trace
