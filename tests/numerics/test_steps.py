"""The distance of floats in units in the last place, against integers in the order of the floats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.numerics.dtype import bit_patterns
from consistency.numerics.steps import Steps

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def ordered_integers(flat: torch.Tensor) -> torch.Tensor:
    """Say in torch what `Steps` counts in NumPy: adjacent floats are adjacent integers, and both zeros are 0.

    The distance of two images is the distance in units in the last place. NaN has no place in the order.
    """
    bits = bit_patterns(flat).to(torch.int64)
    if flat.element_size() == 1:
        bits = torch.where(bits >= 128, bits - 256, bits)  # float8: sign-extend the byte
    low = -(2 ** (8 * flat.element_size() - 1))
    return torch.where(bits < 0, low - bits, bits)


def all_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return every value of a narrow float that is not NaN, infinities included, in the order of its bits."""
    size = dtype.itemsize
    integers = torch.arange(256**size, dtype=torch.int32).to(torch.uint8 if size == 1 else torch.int16)
    return integers[~torch.isnan(integers.view(dtype))].view(dtype)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_all_numbers_of_a_narrow_float_are_consecutive_integers(dtype: torch.dtype) -> None:
    values = all_numbers(dtype)
    order = torch.argsort(values.to(torch.float64), stable=True)
    integers = ordered_integers(values)[order]
    step = integers.diff()
    numbers = values.to(torch.float64)[order]
    assert torch.equal(step, (numbers.diff() != 0).long())  # 1 from number to number, 0 from one zero to the other
    assert int(torch.count_nonzero(step == 0)) == 1
    assert integers[numbers == 0].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@given(value=st.floats(allow_nan=False, allow_infinity=False), up=st.booleans())
@settings(deadline=None, max_examples=200)
def test_adjacent_floats_are_adjacent_integers(dtype: torch.dtype, value: float, up: bool) -> None:
    x = torch.tensor([value], dtype=torch.float64).to(dtype)
    y = torch.nextafter(x, torch.tensor(math.inf if up else -math.inf, dtype=dtype))
    distance = int(ordered_integers(y)) - int(ordered_integers(x))
    assert distance == (int(y != x) if up else -int(y != x))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@given(
    pairs=st.lists(st.tuples(*[st.floats(-2.0, 2.0) | st.floats(allow_nan=False)] * 2), min_size=1, max_size=20),
    left_out=st.integers(0, 2**20 - 1),
)
@settings(deadline=None, max_examples=100)
def test_the_largest_distance_is_that_of_the_integers(
    dtype: torch.dtype, pairs: list[tuple[float, float]], left_out: int
) -> None:
    x, y = (torch.tensor(side, dtype=torch.float64).to(dtype) for side in zip(*pairs, strict=True))
    apart = [abs(int(a) - int(b)) for a, b in zip(ordered_integers(x), ordered_integers(y), strict=True)]
    bits = bit_patterns(x).numpy(), bit_patterns(y).numpy()
    steps = Steps.between(*bits, np.bitwise_xor(*bits))
    assert steps.largest == max(apart)
    out = [bool(left_out >> i & 1) for i in range(len(pairs))]
    assert steps.without(np.array(out)) == max(0 if o else a for o, a in zip(out, apart, strict=True))
