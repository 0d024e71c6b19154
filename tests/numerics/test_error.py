from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.numerics import chunks, error
from consistency.numerics.bound import Allowance
from consistency.numerics.chunks import CHUNK, LowRankProduct, LowRankTensor, Stretch
from consistency.numerics.distance import hexadecimal
from consistency.numerics.error import ErrorMeter, measure_against_exact, measure_low_rank
from consistency.numerics.kernels.tally import ErrorTally, total

pytestmark = pytest.mark.usefixtures("numerics_path")

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


@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, CHUNK + 3])
def test_an_error_is_found_in_whatever_chunk_it_is(place: int) -> None:
    exact = torch.ones(2, CHUNK // 2 + 2, dtype=torch.float64)
    actual = exact.float()
    actual.view(-1)[place] = 1.5
    found = measure_against_exact(actual, exact)
    assert found.worst_index == divmod(place, CHUNK // 2 + 2)
    assert (found.mismatched, found.max_abs) == (1, 0.5)


def metered(*parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]) -> ErrorTally:
    """Measure stretches of one tensor, each with its exact value and its tolerance."""
    meter, start = ErrorMeter(parts[0][0].dtype), 0
    for actual, exact, allowed in parts:
        size = None if allowed is None else allowed.numpy()
        meter.add(Stretch(start=start, actual=actual, value=exact.numpy(), size=size))
        start += actual.numel()
    return meter.tally()


@pytest.mark.parametrize("threads", [2, 3, 9])
@pytest.mark.parametrize("spoiled", [None, NAN, INF])
def test_threads_give_the_same_bits(threads: int, spoiled: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are taken by chunk, the earlier of two worst elements is shown, whichever thread saw it."""
    monkeypatch.setattr(error, "_ELEMENTS_PER_THREAD", 1)
    monkeypatch.setattr(chunks, "_STRETCH", 1 << 15)
    left, right, base = normal(300, 4), normal(4, 700, seed=1), normal(300, 700, seed=2)
    actual = base + left @ right
    for row in (40, 120, 290):
        actual[row, 5] = 70.0 if spoiled is None else spoiled
        base[row], left[row] = base[40], left[40]
    tested = LowRankTensor(actual=actual, allowance=Allowance(product=1e-6, weight=1e-6, floor=1e-9), has_base=True)
    product = LowRankProduct(left=left, right=right, scaling=1.0, base=base)
    before = torch.get_num_threads()
    seen = []
    for number in (1, threads):
        torch.set_num_threads(number)
        (found,) = measure_low_rank([tested], product)
        seen += [repr(found), repr(measure_against_exact(actual, actual.double() + 1e-9))]
    torch.set_num_threads(before)
    assert seen[:2] == seen[2:]
    assert found.worst_index == (40, 5)


SPECIAL = st.sampled_from([0.0, -0.0, NAN, INF, -INF, 1e300, 1e39, 7e4, 1e-46, 1e-8])
NUMBERS = SPECIAL | st.floats(-4.0, 4.0) | st.floats()


STEPS = st.floats(-1e-6, 1e-6).map(lambda step: lambda exact: exact * (1 + step))
NEAR = st.just(lambda exact: exact) | STEPS | NUMBERS.map(lambda number: lambda _: number)
PAIRS = st.tuples(NUMBERS, NEAR).map(lambda drawn: (drawn[1](drawn[0]), drawn[0]))
"""Of a result and the exact value. A strategy per exact value would take hypothesis longer than what is tested."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@given(
    pairs=st.lists(PAIRS, min_size=1, max_size=12),
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
    room = None if allowed is None else torch.tensor(allowed[: len(pairs)], dtype=torch.float64)
    parts = [slice(start, start + cut) for start in range(0, len(pairs), cut)]
    found = metered(*((actual[part], exact[part], None if room is None else room[part]) for part in parts))

    off, relative, badness = [], [], []
    same_bits = [hexadecimal(a) == hexadecimal(r) for a, r in zip(actual, rounded, strict=True)]
    with np.errstate(all="ignore"):
        for i, (a, e) in enumerate(zip(actual.double().numpy(), exact.numpy(), strict=True)):
            settled = a == e or (np.isnan(a) and np.isnan(e)) or (same_bits[i] and not np.isfinite(a))
            error = np.float64(0) if settled else np.abs(a - e)
            off.append(error)
            relative.append(error if error == 0 or np.isinf(error) else error / np.abs(e))
            badness.append(error if room is None or error == 0 else error / room.numpy()[i])
        assert found.mismatched == same_bits.count(False)
        assert np.array_equal(float(found.max_abs), np.max(off), equal_nan=True)
        assert np.array_equal(float(found.max_rel), np.max(relative), equal_nan=True)
        assert total(found.sums) == pytest.approx(float(np.sum(off)), nan_ok=True, rel=1e-12)
        assert total(found.squares) == pytest.approx(float(np.sum(np.square(off))), nan_ok=True, rel=1e-12)
    assert found.magnitude == max((abs(e) for e in exact.tolist() if math.isfinite(e)), default=0.0)
    if room is not None:
        assert np.array_equal(float(found.ratio or 0), np.max(badness), equal_nan=True)
    if found.worst is None:
        assert np.max(badness) == 0
    else:
        assert found.worst.index == int(np.argmax(badness))
        assert np.array_equal(found.worst.score, np.max(badness), equal_nan=True)
        assert np.array_equal(found.worst.exact, exact[found.worst.index], equal_nan=True)
    if np.isnan(off).any():
        assert found.max_ulp is None


def test_exact_values_without_a_number_are_counted_in_every_chunk() -> None:
    exact = normal(3 * CHUNK).to(torch.float64)
    exact[[0, CHUNK, CHUNK + 1]] = torch.tensor([NAN, INF, -INF], dtype=torch.float64)
    found = measure_against_exact(exact.to(torch.float32), exact)
    assert found.not_finite == 3
    assert (found.mismatched, float(found.max_abs) < 1e-6) == (0, True)
