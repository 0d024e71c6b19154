"""How far one tensor is from another of the same dtype: bit by bit, and as numbers.

One pass over chunks that stay in cache; nothing of the size of a tensor is allocated. The compiled kernel measures the
common floats, on as many threads as torch uses, where it may be trusted. NumPy measures everything else, and everything
where there is no kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from consistency.errors import StructureError
from consistency.numerics.dtype import bit_patterns, name_of, real_view
from consistency.numerics.kernels import trust
from consistency.numerics.kernels.compiled import KINDS
from consistency.numerics.kernels.numpy_distance import measure_by_numpy
from consistency.numerics.kernels.tally import Tally, total
from consistency.numerics.real import Real


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How far a tensor is from its reference. Raw numbers; rounding happens where they are shown.

    Attributes
    ----------
    elements, mismatched : int
        All elements, and those whose bits differ from the reference (an exact one is first rounded to the dtype).
    max_abs, mean_abs, rms : float
        Of the difference, in the tensors' own unit, in float64. NaN where one side alone is NaN.
    max_rel : float
        Largest difference over the magnitude of the reference; infinite where that is zero or the difference infinite.
    max_ulp : int or None
        In units in the last place of the dtype; None where it is not defined (NaN on one side, no float).
    bound_ratio : float or None
        Largest difference over what is allowed for that element; None for a bitwise rule.
    worst_index : tuple of int or None
        Index of the element that is worst by `bound_ratio`, or by difference; None where all bits are equal.
    worst_actual, worst_expected : float or None
    worst_actual_bits, worst_expected_bits : str or None
        Hexadecimal, most significant digit first.
    flipped_bits : dict of int to int
        For a bitwise comparison: how many elements differ in that bit; 0 is the least significant.
    first_byte, last_byte : int or None
        Offsets of the first and the last element that differs, in bytes from the start of the tensor.
    magnitude : float
        Largest finite magnitude of an exact reference; not taken where bits are compared.
    """

    elements: int
    mismatched: int = 0
    max_abs: Real = Real(0.0)
    mean_abs: Real = Real(0.0)
    rms: Real = Real(0.0)
    max_rel: Real = Real(0.0)
    max_ulp: int | None = 0
    bound_ratio: Real | None = None
    worst_index: tuple[int, ...] | None = None
    worst_actual: Real | None = None
    worst_expected: Real | None = None
    worst_actual_bits: str | None = None
    worst_expected_bits: str | None = None
    flipped_bits: dict[int, int] = field(default_factory=dict)
    first_byte: int | None = None
    last_byte: int | None = None
    magnitude: Real = Real(0.0)


def measure(actual: torch.Tensor, expected: torch.Tensor) -> Measure:
    """Measure how far `actual` is from `expected`, bit by bit and as numbers.

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
    return _result(tally, a, e, tuple(actual.shape), parts)


def _result(tally: Tally, a: torch.Tensor, e: torch.Tensor, shape: tuple[int, ...], parts: int) -> Measure:
    elements = math.prod(shape)
    size, worst = a.element_size(), None if tally.worst is None else tally.worst[1]
    return Measure(
        elements=elements,
        mismatched=tally.mismatched,
        max_abs=Real(tally.max_abs),
        mean_abs=Real(total(tally.sums) / max(1, elements)),
        rms=Real(math.sqrt(total(tally.squares) / max(1, elements))),
        max_rel=Real(tally.max_rel),
        max_ulp=tally.max_ulp,
        flipped_bits=tally.flipped,
        first_byte=None if tally.first is None else tally.first * size,
        last_byte=None if tally.last is None else tally.last * size,
        **({} if worst is None else describe_worst(worst // parts, shape, a[worst], e[worst], e[worst])),
    )


def describe_worst(
    index: int, shape: tuple[int, ...], actual: torch.Tensor, rounded: torch.Tensor, expected: float | torch.Tensor
) -> dict[str, Any]:
    """Return the fields of `Measure` on the worst element, given by its flat index.

    `rounded` is the reference in the dtype of `actual`, `expected` its exact value.
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
