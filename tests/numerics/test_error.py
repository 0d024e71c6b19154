from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.numerics.chunks import CHUNK, Chunk
from consistency.numerics.distance import hexadecimal
from consistency.numerics.error import ErrorTally, measure_against_exact

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
        actual = (exact + torch.tensor([0.0, error])).float()
        tally.add(Chunk(actual=actual, exact=exact.numpy(), allowed=np.full(2, 0.25), start=start))
    found = tally.result()
    assert (found.bound_ratio, found.worst_index) == (2.0, (1,))


def test_the_worst_element_is_the_one_that_is_worst_by_what_is_allowed() -> None:
    tally = ErrorTally(shape=(2,), dtype=torch.float32)
    exact = tensor(1.0, 1.0, dtype=torch.float64)
    tally.add(Chunk(actual=tensor(1.5, 1.25), exact=exact.numpy(), allowed=np.array([1.0, 0.125]), start=0))
    found = tally.result()
    assert (found.bound_ratio, found.worst_index, found.max_abs) == (2.0, (1,), 0.5)


def test_nothing_off_where_nothing_is_allowed_is_right() -> None:
    tally = ErrorTally(shape=(2,), dtype=torch.float32)
    exact = tensor(1.0, 2.0, dtype=torch.float64)
    tally.add(Chunk(actual=exact.float(), exact=exact.numpy(), allowed=np.zeros(2), start=0))
    assert tally.result().bound_ratio == 0.0
    tally.add(Chunk(actual=tensor(1.0, 2.5), exact=exact.numpy(), allowed=np.zeros(2), start=0))
    assert tally.result().bound_ratio == INF


def test_a_ratio_that_was_nan_stays_nan() -> None:
    tally = ErrorTally(shape=(2,), dtype=torch.float32)
    for start, value in ((0, NAN), (1, 1.0)):
        one = tensor(1.0, dtype=torch.float64)
        tally.add(Chunk(actual=tensor(value), exact=one.numpy(), allowed=one.numpy(), start=start))
    assert math.isnan(tally.result().bound_ratio or 0)
    assert tally.result().worst_index == (0,)


SPECIAL = st.sampled_from([0.0, -0.0, NAN, INF, -INF, 1e300, 1e39, 7e4, 1e-46, 1e-8])
NUMBERS = SPECIAL | st.floats(-4.0, 4.0) | st.floats()


def near(exact: float) -> st.SearchStrategy[float]:
    steps = st.floats(-1e-6, 1e-6).map(lambda step: exact * (1 + step))
    return st.just(exact) | steps | NUMBERS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@given(
    pairs=st.lists(NUMBERS.flatmap(lambda e: st.tuples(near(e), st.just(e))), min_size=1, max_size=12),
    allowed=st.lists(st.sampled_from([0.0, 1e-300, 1e-7, 1.0, INF]), min_size=12, max_size=12) | st.none(),
    cut=st.integers(1, 12),
)
@settings(deadline=None, max_examples=200)
def test_the_measure_is_what_one_element_after_the_other_gives(
    dtype: torch.dtype, pairs: list[tuple[float, float]], allowed: list[float] | None, cut: int
) -> None:
    """Written out once more without arrays, with what is said of infinities and NaN."""
    actual = torch.tensor([a for a, _ in pairs], dtype=torch.float64).to(dtype)
    exact = torch.tensor([e for _, e in pairs], dtype=torch.float64)
    rounded = exact.to(dtype)
    tally = ErrorTally(shape=(len(pairs),), dtype=dtype)
    room = None if allowed is None else np.array(allowed[: len(pairs)])
    for start in range(0, len(pairs), cut):
        part = slice(start, start + cut)
        limit = None if room is None else room[part]
        tally.add(Chunk(actual=actual[part], exact=exact[part].numpy(), allowed=limit, start=start))
    found = tally.result()

    off, relative, badness = [], [], []
    same_bits = [hexadecimal(a) == hexadecimal(r) for a, r in zip(actual, rounded, strict=True)]
    with np.errstate(all="ignore"):
        for i, (a, e) in enumerate(zip(actual.double().numpy(), exact.numpy(), strict=True)):
            settled = a == e or (np.isnan(a) and np.isnan(e)) or (same_bits[i] and not np.isfinite(a))
            error = np.float64(0) if settled else np.abs(a - e)
            off.append(error)
            relative.append(error if error == 0 or np.isinf(error) else error / np.abs(e))
            badness.append(error if room is None or error == 0 else error / room[i])
        assert found.mismatched == same_bits.count(False)
        assert np.array_equal(float(found.max_abs), np.max(off), equal_nan=True)
        assert np.array_equal(float(found.max_rel), np.max(relative), equal_nan=True)
        assert float(found.mean_abs) == pytest.approx(float(np.sum(off)) / len(off), nan_ok=True, rel=1e-12)
        squares = float(np.sum(np.square(off)))
        assert float(found.rms) == pytest.approx(math.sqrt(squares / len(off)), nan_ok=True, rel=1e-12)
    assert found.magnitude == max((abs(e) for e in exact.tolist() if math.isfinite(e)), default=0.0)
    if room is not None:
        assert np.array_equal(float(found.bound_ratio or 0), np.max(badness), equal_nan=True)
    if found.worst_index is None:
        assert np.max(badness) == 0
    else:
        (place,) = found.worst_index
        assert np.array_equal(badness[place], np.max(badness), equal_nan=True)
        assert found.worst_actual_bits == hexadecimal(actual[place])
        assert found.worst_expected_bits == hexadecimal(rounded[place])
    if np.isnan(off).any():
        assert found.max_ulp is None
