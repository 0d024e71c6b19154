from __future__ import annotations

import pytest
import torch

from consistency.numerics.dtype import (
    HALF_SMALLEST_SUBNORMAL,
    UNIT_ROUNDOFF,
    bit_patterns,
    name_of,
    named,
    real_view,
)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool], ids=str)
def test_a_name_and_its_dtype_belong_together(dtype: torch.dtype) -> None:
    assert named(name_of(dtype)) is dtype
    assert "torch" not in name_of(dtype)


@pytest.mark.parametrize("name", ["float33", "Tensor", "nn", "", "__name__"])
def test_what_is_no_dtype_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a dtype"):
        named(name)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_unit_roundoff_is_half_the_distance_from_one_to_the_next_number(dtype: torch.dtype) -> None:
    assert UNIT_ROUNDOFF[dtype] == torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_half_the_smallest_subnormal(dtype: torch.dtype) -> None:
    smallest = bit_patterns(torch.zeros(1, dtype=dtype)).add(1).view(dtype).to(torch.float64)
    assert HALF_SMALLEST_SUBNORMAL[dtype] == float(smallest) / 2


def test_a_complex_tensor_is_twice_as_many_real_numbers() -> None:
    tensor = torch.tensor([[1 + 2j, 3 - 4j]], dtype=torch.complex64)
    assert real_view(tensor).tolist() == [1.0, 2.0, 3.0, -4.0]
    assert real_view(tensor.conj()).tolist() == [1.0, -2.0, 3.0, 4.0]
    assert real_view(torch.ones(2, 3)).shape == (6,)
    assert real_view(torch.tensor(7)).tolist() == [7]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, *NARROW, torch.float32, torch.float64], ids=str)
def test_bit_patterns_have_the_width_of_the_dtype(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1]).to(dtype)
    assert bit_patterns(tensor).element_size() == tensor.element_size()
    assert bit_patterns(tensor).view(dtype).tolist() == tensor.tolist()
