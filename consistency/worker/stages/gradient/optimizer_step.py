"""A parameter after one step of the optimizer, by the gradient that this device computed.

The step is elementwise, so it is taken and judged a piece at a time: its bound needs some ten float64 arrays of a
piece's size, and the optimizer four copies of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch

from consistency.numerics.chunks import Chunk, Stretch
from consistency.numerics.digest import TensorDigest, block_digests, combine
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error import measure_stretches
from consistency.numerics.rules import Rule
from consistency.numerics.running_error import Arithmetic
from consistency.worker.recorder import UserTolerance
from consistency.worker.stages import adamw
from consistency.worker.stages.context import Context

PIECE = 1 << 20
"""Elements per piece: 8 MiB in float64, and whole blocks of a digest in every dtype."""


def stepped(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a piece of a parameter after the first step of the optimizer, on its device."""
    return adamw.step(parameter, gradient)


def record_step(context: Context, name: str, layer: str, tensor: str, gradients: torch.Tensor) -> None:
    """Record a parameter after a step by its gradients `(passes, *shape)`, which are added up: of the whole batch."""
    parameter = context.model.get_parameter(name)
    gradient = gradients.sum(0)
    if parameter.dtype not in UNIT_ROUNDOFF or not bool(torch.isfinite(gradient).all()):
        context.record.absent(
            "gradient", layer, tensor, status="skipped", rule=Rule.BOUND,
            reason=f"no bound for the step of a {parameter.dtype} parameter, or by a gradient that is not finite",
        )  # fmt: skip
        return
    before = parameter.detach().to("cpu").reshape(-1)
    actual, digests = _stepped(context, parameter, gradient)
    tolerance = context.record.tolerance(stage="gradient", layer=layer, dtype=actual.dtype)

    def stretches() -> Iterator[Stretch]:
        return _exact(actual.reshape(-1), before, gradient.reshape(-1), tolerance)

    def chunks() -> Iterator[Chunk]:
        for chunk in itertools.chain.from_iterable(stretch.chunks() for stretch in stretches()):
            yield dataclasses.replace(chunk, base=before[chunk.start : chunk.start + chunk.actual.numel()])

    context.record.computed(
        "gradient", layer, tensor, actual=actual, digests=digests, found=measure_stretches(actual, stretches()),
        rule=Rule.BOUND, tolerance=tolerance, chunks=chunks,
    )  # fmt: skip


def _stepped(
    context: Context, parameter: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, list[TensorDigest]]:
    """Return the parameter after the step, on the CPU, and one digest for each run."""
    flat, given = parameter.detach().reshape(-1), gradient.reshape(-1)
    actual = torch.empty(flat.shape, dtype=flat.dtype)
    digests = []
    for repeat in range(context.job.case.repeat):
        blocks: list[int] = []
        for piece in _pieces(flat.numel()):
            new = stepped(flat[piece], given[piece].to(flat.device))
            blocks.extend(block_digests(new))
            if not repeat:
                actual[piece] = new.to("cpu")
        digests.append(combine(name_of(flat.dtype), tuple(parameter.shape), tuple(blocks)))
    return actual.reshape(parameter.shape), digests


def _exact(
    actual: torch.Tensor, before: torch.Tensor, gradient: torch.Tensor, tolerance: UserTolerance | None
) -> Iterator[Stretch]:
    """Yield a flat parameter with the exact values of its step and what is allowed, a piece at a time."""
    by = Arithmetic.of(actual.dtype)
    for piece in _pieces(actual.numel()):
        exact = adamw.exact_step(*(by.known(t[piece].to(torch.float64).numpy()) for t in (before, gradient)))
        yield Stretch(
            start=piece.start,
            actual=actual[piece],
            value=exact.value,
            size=None if tolerance else exact.allowed,
            allowance=tolerance,
        )


def _pieces(elements: int) -> Iterator[slice]:
    for start in range(0, elements, PIECE):
        yield slice(start, min(elements, start + PIECE))
