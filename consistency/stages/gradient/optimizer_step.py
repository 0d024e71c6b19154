"""A parameter after one step of the optimizer, by the gradient that this device computed.

The step is elementwise, so it is taken and judged a piece at a time: the optimizer needs four copies of a piece, and
its bound some twenty float64 arrays of a part of it. The result is in a scratch file.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator

import numpy as np
import torch

from consistency.capture.names import UPDATED
from consistency.capture.records import TensorRecord
from consistency.numerics.chunks import Chunk, Stretch
from consistency.numerics.digest import TensorDigest, block_digests, combine
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error import measure_stretches
from consistency.numerics.file_tensor import Elements, elements_of, mapped
from consistency.numerics.rules import Rule
from consistency.numerics.running_error import Arithmetic
from consistency.worker.context import Context
from consistency.worker.model.tensor_file import TensorFile
from consistency.worker.recorder import UserTolerance
from consistency.worker.training import adamw

PIECE = 1 << 20
"""Elements per piece: 8 MiB in float64, and whole blocks of a digest in every dtype."""

PART = 1 << 16
"""Elements whose exact step is taken at once: some twenty arrays of 512 KiB, which the C library keeps for reuse. With
fresh memory for each, page faults take most of the time."""


def stepped(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a piece of a parameter after the first step of the optimizer, on its device."""
    return adamw.step(parameter, gradient)


def record_step(context: Context, name: str, layer: str, tensor: str, found: torch.Tensor) -> None:
    """Record a parameter after a step by its gradient, on the CPU."""
    parameter = context.model.get_parameter(name)
    gradient, elements = elements_of(found), parameter.numel()
    unknown = parameter.dtype not in UNIT_ROUNDOFF
    if unknown or not _is_finite(gradient, elements):
        reason = f"no bound is derived in {name_of(parameter.dtype)}" if unknown else "the gradient is NaN or infinite"
        context.record.skipped("gradient", f"AdamW step not judged: {reason}", tensor, layer=layer, rule=Rule.BOUND)
        return
    flat = parameter.detach().reshape(-1)
    if not _is_bounded(flat, gradient):
        reason = f"AdamW's ε is 0 in {name_of(parameter.dtype)}: its step divides small gradients by zero"
        context.record.skipped("gradient", reason, tensor, layer=layer, rule=Rule.BOUND)
        return
    layout = {UPDATED: (parameter.dtype, tuple(parameter.shape))}
    file = TensorFile(context.scratch / f"updated-{os.getpid()}.safetensors", layout)  # the folder is all workers'
    try:
        digests = _stepped(context, parameter, gradient, file)
        actual = file.read(UPDATED)
        assert actual is not None
        tolerance = context.record.tolerance(stage="gradient", layer=layer, dtype=actual.dtype)

        def before(part: slice) -> torch.Tensor:
            return flat[part].to("cpu")

        def stretches() -> Iterator[Stretch]:
            return _exact(elements_of(actual), before, gradient, elements, tolerance)

        def chunks() -> Iterator[Chunk]:
            for chunk in itertools.chain.from_iterable(stretch.chunks() for stretch in stretches()):
                yield dataclasses.replace(chunk, base=before(slice(chunk.start, chunk.start + chunk.actual.numel())))

        context.record.computed(
            TensorRecord("gradient", layer, tensor, rule=Rule.BOUND, status="measured"),
            mapped(actual),
            digests=digests,
            tolerance=tolerance,
            found=measure_stretches(actual, stretches()),
            chunks=chunks,
        )
    finally:
        file.close(remove=True)


def _is_finite(gradient: Elements, elements: int) -> bool:
    return all(bool(torch.isfinite(gradient(piece)).all()) for piece in pieces(elements))


def _is_bounded(parameter: torch.Tensor, gradient: Elements) -> bool:
    """Report whether the step of every element has a bound.

    Without ε, squares of gradients that the dtype rounds to zero make the denominator zero: on any device the result is
    NaN or infinite.
    """
    if float(torch.tensor(adamw.EPSILON, dtype=parameter.dtype)) > 0:
        return True
    by = Arithmetic.of(parameter.dtype)
    for piece in pieces(parameter.numel()):
        given = parameter[piece].to("cpu"), gradient(piece).to("cpu")
        for start in range(0, given[0].numel(), PART):
            part = slice(start, start + PART)
            exact = adamw.exact_step(*(by.known(t[part].to(torch.float64).numpy()) for t in given))
            if not np.isfinite(exact.allowed).all():
                return False
    return True


def _stepped(context: Context, parameter: torch.Tensor, gradient: Elements, into: TensorFile) -> list[TensorDigest]:
    """Write the parameter after the step into a file, and return one digest for each run."""
    flat = parameter.detach().reshape(-1)
    digests = []
    for repeat in range(context.job.case.repeat):
        blocks: list[int] = []
        for piece in pieces(flat.numel()):
            new = stepped(flat[piece], gradient(piece).to(flat.device))
            blocks.extend(block_digests(new))
            if not repeat:
                into.write_elements(UPDATED, piece.start, new.to("cpu").contiguous())
        digests.append(combine(name_of(flat.dtype), tuple(parameter.shape), tuple(blocks)))
    return digests


def _exact(
    actual: Elements, before: Elements, gradient: Elements, elements: int, tolerance: UserTolerance | None
) -> Iterator[Stretch]:
    """Yield a flat parameter with the exact values of its step and what is allowed, a part at a time."""
    for piece in pieces(elements):
        after, *given = actual(piece), before(piece), gradient(piece)
        by = Arithmetic.of(after.dtype)
        for start in range(0, after.numel(), PART):
            part = slice(start, start + PART)
            exact = adamw.exact_step(*(by.known(t[part].to(torch.float64).numpy()) for t in given))
            yield Stretch(
                start=piece.start + start,
                actual=after[part],
                value=exact.value,
                size=None if tolerance else exact.allowed,
                allowance=tolerance,
            )


def pieces(elements: int) -> Iterator[slice]:
    """Yield the pieces of a parameter of so many elements, one where there are none."""
    for start in range(0, max(1, elements), PIECE):
        yield slice(start, min(elements, start + PIECE))
