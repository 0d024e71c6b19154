from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from consistency.numerics.bound import measure_against_exact
from consistency.numerics.error import CHUNK, ErrorTally

NAN, INF = math.nan, math.inf


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_correct_rounding_has_no_mismatch_and_an_error_of_half_a_step(dtype: torch.dtype) -> None:
    exact = normal(50, 40).to(torch.float64) / 3
    found = measure_against_exact(exact.to(dtype), exact)
    assert (found.elements, found.mismatched, found.max_ulp) == (2000, 0, 0)
    assert 0 < found.max_abs <= torch.finfo(dtype).eps / 2 * float(exact.abs().max())
    assert found.max_rel <= torch.finfo(dtype).eps / 2
    assert found.magnitude == float(exact.abs().max())
    assert found.worst_index is not None
    assert abs((found.worst_actual or 0) - float(exact[found.worst_index])) == found.max_abs


def test_a_step_from_the_correct_rounding_is_one_mismatch() -> None:
    exact = tensor(1.0, 2.0, 3.0, dtype=torch.float64).reshape(1, 3)
    actual = tensor(1.0, 2.0 + 2.0**-22, 3.0).reshape(1, 3)
    found = measure_against_exact(actual, exact)
    assert (found.mismatched, found.max_ulp, found.worst_index, found.max_abs) == (1, 1, (0, 1), 2.0**-22)
    assert (found.worst_actual_bits, found.worst_expected_bits) == ("0x40000001", "0x40000000")


def test_an_exact_result_has_no_worst_element() -> None:
    exact = tensor(1.0, -2.0, dtype=torch.float64)
    found = measure_against_exact(exact.float(), exact)
    assert (found.max_abs, found.worst_index, found.worst_actual) == (0.0, None, None)


def test_overflow_where_the_exact_value_overflows_too_is_right() -> None:
    found = measure_against_exact(tensor(INF, dtype=torch.float16), tensor(1e6, dtype=torch.float64))
    assert (found.mismatched, found.max_abs) == (0, 0.0)
    wrong = measure_against_exact(tensor(INF, dtype=torch.float16), tensor(100.0, dtype=torch.float64))
    assert (wrong.mismatched, wrong.max_abs) == (1, INF)


def test_nan_where_the_exact_value_is_a_number_is_the_worst() -> None:
    found = measure_against_exact(tensor(9.0, NAN), tensor(1.0, 1.0, dtype=torch.float64))
    assert math.isnan(found.max_abs)
    assert found.worst_index == (1,)


@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, CHUNK + 3])
def test_an_error_is_found_in_whatever_chunk_it_is(place: int) -> None:
    exact = torch.ones(2, CHUNK // 2 + 2, dtype=torch.float64)
    actual = exact.float()
    actual.view(-1)[place] = 1.5
    found = measure_against_exact(actual, exact)
    assert found.worst_index == divmod(place, CHUNK // 2 + 2)
    assert (found.mismatched, found.max_abs) == (1, 0.5)


def test_the_ratio_is_the_largest_over_all_chunks() -> None:
    tally = ErrorTally(shape=(4,), dtype=torch.float32)
    for start, error in ((0, 0.5), (2, 0.25)):
        exact = torch.ones(2, dtype=torch.float64)
        tally.add(
            (exact + torch.tensor([0.0, error])).float(), exact, allowed=torch.full((2,), 0.25).double(), start=start
        )
    found = tally.result()
    assert (found.bound_ratio, found.worst_index) == (2.0, (1,))


def test_the_worst_element_is_the_one_that_is_worst_by_what_is_allowed() -> None:
    tally = ErrorTally(shape=(2,), dtype=torch.float32)
    exact = tensor(1.0, 1.0, dtype=torch.float64)
    tally.add(tensor(1.5, 1.25), exact, allowed=tensor(1.0, 0.125, dtype=torch.float64), start=0)
    found = tally.result()
    assert (found.bound_ratio, found.worst_index, found.max_abs) == (2.0, (1,), 0.5)


def test_nothing_off_where_nothing_is_allowed_is_right() -> None:
    tally = ErrorTally(shape=(2,), dtype=torch.float32)
    exact = tensor(1.0, 2.0, dtype=torch.float64)
    tally.add(exact.float(), exact, allowed=torch.zeros(2, dtype=torch.float64), start=0)
    assert tally.result().bound_ratio == 0.0
    tally.add(tensor(1.0, 2.5), exact, allowed=torch.zeros(2, dtype=torch.float64), start=0)
    assert tally.result().bound_ratio == INF


def test_a_ratio_that_was_nan_stays_nan() -> None:
    tally = ErrorTally(shape=(2,), dtype=torch.float32)
    for start, value in ((0, NAN), (1, 1.0)):
        one = tensor(1.0, dtype=torch.float64)
        tally.add(tensor(value), one, allowed=one, start=start)
    assert math.isnan(tally.result().bound_ratio or 0)
    assert tally.result().worst_index == (0,)
