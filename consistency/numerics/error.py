"""Measure how far a computed tensor is from its exact value, in float64, in one pass.

The compiled kernel measures the common floats, on as many threads as torch uses, where it may be trusted. NumPy
measures everything else, and everything where there is no kernel.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from consistency.numerics.bound import UserAllowance
from consistency.numerics.chunks import CHUNK, LowRankProduct, LowRankTensor, Stretch
from consistency.numerics.distance import NO_WORST, describe_worst
from consistency.numerics.dtype import name_of
from consistency.numerics.file_tensor import Readable, elements_of, mapped, parts_of
from consistency.numerics.kernels import trust
from consistency.numerics.kernels.compiled import KINDS, errors_in, pool
from consistency.numerics.kernels.compiled_error import CompiledErrors, fits
from consistency.numerics.kernels.numpy_error import errors_by_numpy
from consistency.numerics.kernels.tally import ErrorTally, WorstError, total
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real

_ELEMENTS_PER_THREAD = 1 << 18
"""Least work for a thread: to hand it over takes some 30 µs; to measure this much takes some 300 µs."""


class ErrorMeter:
    """Measure a tensor of floats of one dtype, stretch by stretch."""

    def __init__(self, dtype: torch.dtype) -> None:
        kind = name_of(dtype)
        self._compiled: CompiledErrors | None = None
        if kind in KINDS:
            kernel = trust.trusted(errors_in(kind))
            if kernel is not None:
                self._compiled = CompiledErrors(kernel)
        self._by_numpy = ErrorTally()

    def add(self, stretch: Stretch) -> None:
        """Add a stretch; its arrays are left as they are.

        The kernel takes stretches of some layouts only, so some of a tensor's may be measured by NumPy.
        """
        if self._compiled is not None and fits(stretch):
            self._compiled.add(stretch)
            return
        for chunk in stretch.chunks():
            self._by_numpy.include(errors_by_numpy(chunk))

    def tally(self) -> ErrorTally:
        """Return the tally of all stretches so far."""
        tally = ErrorTally() if self._compiled is None else self._compiled.tally()
        tally.include(self._by_numpy)
        return tally


def measure_low_rank(tensors: Sequence[LowRankTensor], product: LowRankProduct) -> list[Measure]:
    """Measure how far deltas and merged weights of one layer are from their exact values, which are made once."""
    step = product.rows_per_stretch
    actual = [tested.actual for tested in tensors]

    def add_up(stretch_numbers: range) -> list[ErrorTally]:
        # the last stretch may have fewer rows
        rows = range(stretch_numbers.start * step, min(product.rows, stretch_numbers.stop * step))
        return _add_up(actual, product.stretches(tensors, rows))

    return _on_threads(actual, add_up, -(-product.rows // step), step * product.columns)


def measure_against_exact(
    actual: Readable,
    exact: Readable,
    allowed: UserAllowance | torch.Tensor | None = None,
) -> Measure:
    """Measure how far a tensor is from a float64 reference of the same shape, both on the CPU or in files.

    `allowed` is the user's tolerance, or that of each element (float64, of the same shape). Without one there is no
    `ratio`: only the tolerance of the tensor as a whole is known then.
    """
    elements = math.prod(actual.shape)
    actual_elements, exact_elements = elements_of(actual), elements_of(exact)
    tolerances = allowed.reshape(-1).numpy() if isinstance(allowed, torch.Tensor) else None
    allowance = allowed if isinstance(allowed, UserAllowance) else None

    def stretches(chunks: range) -> Iterator[tuple[Stretch, ...]]:
        for part in parts_of(chunks.start * CHUNK, min(elements, chunks.stop * CHUNK)):
            yield (
                Stretch(
                    start=part.start,
                    actual=actual_elements(part),
                    value=exact_elements(part).numpy(),
                    size=None if tolerances is None else tolerances[part],
                    allowance=allowance,
                ),
            )

    (measure,) = measure_in_parts([actual], stretches, -(-elements // CHUNK), CHUNK)
    return measure


def measure_stretches(actual: Readable, stretches: Iterable[Stretch]) -> Measure:
    """Measure a tensor whose exact value is made stretch by stretch, in order, each of whole chunks but the last."""
    meter = ErrorMeter(actual.dtype)
    for stretch in stretches:
        meter.add(stretch)
    return _measure_of_tally(meter.tally(), actual)


def measure_in_parts(
    tensors: Sequence[Readable],
    stretches: Callable[[range], Iterable[tuple[Stretch, ...]]],
    count: int,
    elements: int,
) -> list[Measure]:
    """Measure tensors on several threads.

    Sums are taken by chunk within a part, so the results do not depend on the threads.

    Parameters
    ----------
    stretches : callable
        Returns from a range of part numbers the stretches of these parts, in order, each a tuple with one of every
        tensor.
    count, elements : int
        Number of parts, and of the elements in each.
    """
    return _on_threads(tensors, lambda part: _add_up(tensors, stretches(part)), count, elements)


def _add_up(tensors: Sequence[Readable], stretches: Iterable[tuple[Stretch, ...]]) -> list[ErrorTally]:
    """Return the tally of each tensor, from stretches of all of them."""
    meters = [ErrorMeter(tensor.dtype) for tensor in tensors]
    for stretch_of_each in stretches:
        for meter, stretch in zip(meters, stretch_of_each, strict=True):
            meter.add(stretch)
    return [meter.tally() for meter in meters]


def _on_threads(
    tensors: Sequence[Readable], add_up: Callable[[range], list[ErrorTally]], count: int, elements: int
) -> list[Measure]:
    """Measure tensors by a function that tallies a range of parts; the parameters are those of `measure_in_parts`."""
    # a small tensor is measured on this thread alone: see `_ELEMENTS_PER_THREAD`
    threads = max(1, min(torch.get_num_threads(), count * elements // _ELEMENTS_PER_THREAD))
    step = max(1, -(-count // threads))
    ranges = [range(start, min(count, start + step)) for start in range(0, count, step)]
    first, *further = ranges or [range(0)]
    futures = [pool(os.getpid(), threads - 1).submit(add_up, part_numbers) for part_numbers in further]
    tallies = add_up(first)  # on this thread, while the others run
    for future in futures:
        for tally, further_tally in zip(tallies, future.result(), strict=True):
            tally.include(further_tally)
    return [_measure_of_tally(tally, tensor) for tally, tensor in zip(tallies, tensors, strict=True)]


def _measure_of_tally(tally: ErrorTally, tensor: Readable) -> Measure:
    """Return the measure of a whole tensor, with the values of its worst element."""
    shape = tuple(tensor.shape)
    n = max(1, math.prod(shape))  # of no elements the means are 0
    worst_fields = NO_WORST
    if tally.worst is not None:
        worst_fields = _worst_fields(tally.worst, mapped(tensor), shape, tally.ratio)
    return Measure(
        elements=math.prod(shape),
        mismatched=tally.mismatched,
        max_abs=Real(tally.max_abs),
        mean_abs=Real(total(tally.sums) / n),
        rms=Real(math.sqrt(total(tally.squares) / n)),
        max_rel=Real(tally.max_rel),
        max_ulp=tally.max_ulp,
        ratio=None if tally.ratio is None else Real(tally.ratio),
        magnitude=Real(tally.magnitude),
        not_finite=tally.not_finite,
        **worst_fields,
    )


def _worst_fields(
    worst: WorstError, tensor: torch.Tensor, shape: tuple[int, ...], ratio: float | None
) -> dict[str, Any]:
    """Return the fields of `Measure` on the worst element, whose error is `ratio` times its tolerance."""
    actual = tensor[tuple(map(int, np.unravel_index(worst.index, shape)))]
    # bits are shown of the nearest number that the tensor could have held
    rounded = torch.tensor(worst.exact, dtype=torch.float64).to(tensor.dtype)
    fields = describe_worst(worst.index, shape, actual, rounded, worst.exact)
    allowed: Real | None = None
    if ratio is not None:
        # a tally keeps no tolerance of its worst element: it follows from the error and the ratio
        allowed = _allowed(abs(float(actual) - worst.exact), ratio)
    return {**fields, "allowed": allowed}


def _allowed(error: float, ratio: float) -> Real | None:
    """Return the tolerance of an element whose error is `ratio` times that; None where the two do not tell it."""
    is_known = math.isfinite(error) and ratio > 0
    return Real(error / ratio) if is_known else None
