"""Measure how far one tensor is from another of the same dtype, bitwise and numerically.

One pass over chunks that stay in cache; nothing of the size of a tensor is allocated. The compiled kernel measures the
common floats, on as many threads as torch uses, where it may be trusted. NumPy measures everything else, and everything
where there is no kernel.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from consistency.errors import StructureError
from consistency.numerics.dtype import bit_patterns, name_of, real_view
from consistency.numerics.kernels import trust
from consistency.numerics.kernels.compiled import KINDS
from consistency.numerics.kernels.numpy_distance import measure_by_numpy
from consistency.numerics.kernels.tally import Tally, total
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real

NO_WORST: dict[str, Any] = {"worst_index": None}
"""The fields of `Measure` on the worst element, where no element is wrong."""


def measure(actual: torch.Tensor, expected: torch.Tensor) -> Measure:
    """Measure how far `actual` is from `expected`, bitwise and numerically.

    Parameters
    ----------
    actual, expected : torch.Tensor
        On the CPU, of equal shape and dtype; neither is changed.

    Raises
    ------
    StructureError
        Shapes or dtypes differ: compare structure first.
    """
    if actual.shape != expected.shape:
        raise StructureError("shapes differ", got=tuple(actual.shape), wanted=tuple(expected.shape))
    if actual.dtype != expected.dtype:
        raise StructureError("dtypes differ", got=name_of(actual.dtype), wanted=name_of(expected.dtype))
    a, e = real_view(actual), real_view(expected)
    parts = 2 if actual.is_complex() else 1
    kind = name_of(a.dtype)
    kernel = trust.trusted(kind) if kind in KINDS and a.is_contiguous() and e.is_contiguous() else None
    if kernel is None:
        tally = measure_by_numpy(a, e, parts)
    else:
        threads = torch.get_num_threads()
        tally = kernel.measure(kind, a.data_ptr(), e.data_ptr(), a.numel(), parts=parts, threads=threads)
    return _measure_of_tally(tally, a, e, tuple(actual.shape), parts)


def _measure_of_tally(tally: Tally, a: torch.Tensor, e: torch.Tensor, shape: tuple[int, ...], parts: int) -> Measure:
    """Return the measure of two tensors.

    Parameters
    ----------
    a, e : torch.Tensor
        Flat views of both with real elements.
    shape : tuple of int
        Their shape.
    parts : int
        Real elements of a number: 2 where it is complex, else 1.
    """
    elements = math.prod(shape)
    size = a.element_size()
    worst_fields = NO_WORST
    if tally.worst is not None:
        worst = tally.worst[1]
        worst_fields = describe_worst(worst // parts, shape, a[worst], e[worst], e[worst])
    return Measure(
        elements=elements,
        mismatched=tally.mismatched,
        max_abs=Real(tally.max_abs),
        mean_abs=Real(total(tally.sums) / max(1, elements)),
        rms=Real(math.sqrt(total(tally.squares) / max(1, elements))),
        max_rel=Real(tally.max_rel),
        max_ulp=tally.max_ulp,
        ratio=None,
        magnitude=Real(0.0),
        flipped_bits=tally.flipped,
        first_byte=None if tally.first is None else tally.first * size,
        last_byte=None if tally.last is None else tally.last * size,
        **worst_fields,
    )


def describe_worst(
    index: int, shape: tuple[int, ...], actual: torch.Tensor, rounded: torch.Tensor, expected: float | torch.Tensor
) -> dict[str, Any]:
    """Return the fields of `Measure` on the worst element.

    Parameters
    ----------
    index : int
        Its number in the flattened tensor of this shape.
    actual, rounded : torch.Tensor
        The element, and the reference's in the same dtype.
    expected : float or torch.Tensor
        The reference's exact value.
    """
    return {
        "worst_index": tuple(int(i) for i in np.unravel_index(index, shape)),
        "worst_actual": Real(float(actual)),
        "worst_expected": Real(float(expected)),
        "worst_actual_bits": hexadecimal(actual),
        "worst_expected_bits": hexadecimal(rounded),
    }


def hexadecimal(element: torch.Tensor) -> str:
    """Return the bits of one element, most significant digit first."""
    flat = element.reshape(1)
    value = int(bit_patterns(flat)[0]) & ((1 << (8 * flat.element_size())) - 1)
    return f"0x{value:0{2 * flat.element_size()}x}"
