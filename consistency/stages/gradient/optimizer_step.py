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
from consistency.numerics.running_error import Arithmetic, Tracked
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
    """Return a piece of a parameter after the first step of the optimizer, on its device: faults are planted here."""
    return adamw.step(parameter, gradient)


def record_step(context: Context, name: str, layer: str, tensor: str, found: torch.Tensor) -> None:
    """Record a parameter after one step of the optimizer.

    Parameters
    ----------
    name : str
        Name of the parameter in the model.
    layer, tensor : str
        The row.
    found : torch.Tensor
        The gradient that this device computed, on the CPU.
    """
    parameter = context.model.get_parameter(name)
    gradient = elements_of(found)
    unbounded_reason = _why_no_bound(parameter, gradient)
    if unbounded_reason:
        context.record.skipped("gradient", unbounded_reason, tensor, layer=layer, rule=Rule.BOUND)
        return
    layout = {UPDATED: (parameter.dtype, tuple(parameter.shape))}
    # all workers share the scratch folder, so the name has the process id
    file = TensorFile(context.scratch / f"updated-{os.getpid()}.safetensors", layout)
    try:
        digests = _write_stepped(context, parameter, gradient, file)
        row = TensorRecord("gradient", layer, tensor, rule=Rule.BOUND, status="measured")
        _record_updated(context, parameter, gradient, file, row, digests)
    finally:
        file.close(remove=True)


def _why_no_bound(parameter: torch.nn.Parameter, gradient: Elements) -> str:
    """Return why the step of a parameter cannot be judged; empty where it has a bound."""
    if parameter.dtype not in UNIT_ROUNDOFF:
        return f"AdamW step not judged: no bound is derived in {name_of(parameter.dtype)}"
    if not _is_finite(gradient, parameter.numel()):
        return "AdamW step not judged: the gradient is NaN or infinite"
    if not _is_bounded(parameter.detach().reshape(-1), gradient):
        return f"AdamW's ε is 0 in {name_of(parameter.dtype)}: its step divides small gradients by zero"
    return ""


def _record_updated(
    context: Context,
    parameter: torch.nn.Parameter,
    gradient: Elements,
    file: TensorFile,
    row: TensorRecord,
    digests: list[TensorDigest],
) -> None:
    """Record the parameter in a scratch file against the exact step, a stretch at a time."""
    flat = parameter.detach().reshape(-1)
    updated = file.read(UPDATED)
    assert updated is not None
    tolerance = context.record.tolerance(stage="gradient", layer=row.layer, dtype=updated.dtype)

    def read_before(part: slice) -> torch.Tensor:
        return flat[part].to("cpu")

    # made anew for the measure and for the diagnosis: kept, they would take as much memory as the parameter in float64
    def stretches() -> Iterator[Stretch]:
        return _exact_stretches(elements_of(updated), read_before, gradient, parameter.numel(), tolerance)

    def chunks() -> Iterator[Chunk]:
        for chunk in itertools.chain.from_iterable(stretch.chunks() for stretch in stretches()):
            part = slice(chunk.start, chunk.start + chunk.actual.numel())
            yield dataclasses.replace(chunk, base=read_before(part))

    context.record.computed(
        row,
        mapped(updated),
        digests=digests,
        tolerance=tolerance,
        measure=measure_stretches(updated, stretches()),
        chunks=chunks,
    )


def _is_finite(gradient: Elements, elements: int) -> bool:
    return all(bool(torch.isfinite(gradient(piece)).all()) for piece in pieces(elements))


def _is_bounded(parameter: torch.Tensor, gradient: Elements) -> bool:
    """Report whether the step of every element of a flat parameter has a bound.

    Without ε, squares of gradients that the dtype rounds to zero make the denominator zero: on any device the result is
    NaN or infinite.
    """
    if float(torch.tensor(adamw.EPSILON, dtype=parameter.dtype)) > 0:
        return True
    arithmetic = Arithmetic.of(parameter.dtype)
    for piece in pieces(parameter.numel()):
        before_piece, gradient_piece = parameter[piece].to("cpu"), gradient(piece).to("cpu")
        for start in range(0, before_piece.numel(), PART):
            part = slice(start, start + PART)
            exact = _exact_step(arithmetic, before_piece[part], gradient_piece[part])
            if not np.isfinite(exact.allowed).all():
                return False
    return True


def _write_stepped(
    context: Context, parameter: torch.Tensor, gradient: Elements, file: TensorFile
) -> list[TensorDigest]:
    """Write the parameter after the step of the first run into a file, and return one digest for each run."""
    flat = parameter.detach().reshape(-1)
    digests = []
    for repeat in range(context.job.case.repeat):
        # digests of the blocks of all pieces, which combine to that of the whole parameter
        blocks: list[int] = []
        for piece in pieces(flat.numel()):
            new = stepped(flat[piece], gradient(piece).to(flat.device))
            blocks.extend(block_digests(new))
            # digests compare the later runs with the first
            if repeat == 0:
                file.write_elements(UPDATED, piece.start, new.to("cpu").contiguous())
        digests.append(combine(name_of(flat.dtype), tuple(parameter.shape), tuple(blocks)))
    return digests


def _exact_stretches(
    updated: Elements, before: Elements, gradient: Elements, elements: int, tolerance: UserTolerance | None
) -> Iterator[Stretch]:
    """Yield a flat parameter with the exact values of its step and its tolerance, a part at a time.

    Parameters
    ----------
    updated, before, gradient : Elements
        The parameter after the step on the device, the parameter before it, and its gradient.
    elements : int
        How many elements the parameter has.
    tolerance : UserTolerance or None
        The user's, which replaces the derived bound.
    """
    for piece in pieces(elements):
        after, before_piece, gradient_piece = updated(piece), before(piece), gradient(piece)
        arithmetic = Arithmetic.of(after.dtype)
        for start in range(0, after.numel(), PART):
            part = slice(start, start + PART)
            exact = _exact_step(arithmetic, before_piece[part], gradient_piece[part])
            bound = None if tolerance else exact.allowed
            yield Stretch(
                start=piece.start + start,
                actual=after[part],
                value=exact.value,
                size=bound,
                allowance=tolerance,
            )


def _exact_step(arithmetic: Arithmetic, before: torch.Tensor, gradient: torch.Tensor) -> Tracked:
    """Return a part of a parameter after the step in float64, and the bound of its rounding errors."""
    parameter = arithmetic.known(before.to(torch.float64).numpy())
    slope = arithmetic.known(gradient.to(torch.float64).numpy())
    return adamw.exact_step(parameter, slope)


def pieces(elements: int) -> Iterator[slice]:
    """Yield the slices of a flat parameter, each of `PIECE` elements at most; one empty slice for no elements."""
    for start in range(0, max(1, elements), PIECE):
        yield slice(start, min(elements, start + PIECE))
