from __future__ import annotations

import math

import pytest
import torch

from consistency.numerics.not_finite import count_not_finite

VALUES = [0.0, -0.0, 1.0, math.nan, -math.inf, math.inf, 2.0**-14]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str
)
def test_nan_and_infinities_are_counted_in_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.tensor(VALUES, dtype=torch.float64).to(dtype)
    assert count_not_finite(tensor) == 3
    assert count_not_finite(tensor[:3]) == 0


def test_the_largest_numbers_are_finite_and_all_of_a_large_tensor_is_read() -> None:
    tensor = torch.full((1000, 1001), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    assert count_not_finite(tensor) == 0
    tensor[-1, -1] = math.nan
    assert count_not_finite(tensor) == 1
    assert count_not_finite(tensor.t()) == 1


def test_integers_have_neither_and_complex_numbers_have_two_parts() -> None:
    assert count_not_finite(torch.tensor([1, 2])) == 0
    assert count_not_finite(torch.tensor([complex(math.nan, 1), complex(0, math.inf)])) == 2
    assert count_not_finite(torch.empty(0)) == 0
