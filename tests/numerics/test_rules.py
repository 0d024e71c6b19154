from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.numerics import rules
from consistency.numerics.real import Real
from consistency.numerics.rules import (
    FALSE_ALARM,
    HALF_SMALLEST_SUBNORMAL,
    UNIT_ROUNDOFF,
    RoundingError,
    error_factor,
    passes,
    ratio,
    relative_allowance,
)


def test_the_roundoffs_are_those_of_the_formats() -> None:
    # 1 / 2**(stored mantissa bits + 1), and 2**(exponent of the least subnormal - 1)
    mantissa = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
    assert {name: 2.0 ** -(bits + 1) for name, bits in mantissa.items()} == UNIT_ROUNDOFF
    least = {"float32": -126 - 23, "float16": -14 - 10, "bfloat16": -126 - 7}
    assert {"float64": 0.0} | {name: 2.0 ** (e - 1) for name, e in least.items()} == HALF_SMALLEST_SUBNORMAL


def rounding(largest: float, count: int = 2**14) -> RoundingError:
    return RoundingError(largest=Real(largest), samples=count, drawn=count)


def test_a_device_may_be_off_twice_the_error_of_rounding_and_one_store() -> None:
    assert relative_allowance(rounding(0.25), 8.0, "float32") == 0.5 + 8 * 2.0**-24 + 2.0**-150
    assert relative_allowance(rounding(0.0), 1.0, "bfloat16") == 2.0**-8 + 2.0**-134
    assert relative_allowance(rounding(0.0), 0.0, "float16") == 2.0**-25


def test_the_fewer_errors_the_more_is_luck_and_never_less_than_twice() -> None:
    factors = [error_factor(n, n) for n in range(1, 200)]
    assert factors == sorted(factors, reverse=True)
    assert (error_factor(0, 0), error_factor(2**14, 2**14), error_factor(10**9, 10**9)) == (
        error_factor(1, 1),
        2.0,
        2.0,
    )


@pytest.mark.parametrize("samples", [1, 2, 8, 128])
def test_more_passes_leave_less_to_luck(samples: int) -> None:
    factors = [error_factor(samples, passes * samples) for passes in (1, 2, 4, 8, 16)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] > 1.2 * factors[-1]


@pytest.mark.parametrize("samples", [1, 2])
def test_luck_is_the_ratio_that_healthy_errors_exceed_as_rarely_as_it_says(samples: int) -> None:
    # of one draw each the ratio is Cauchy's, P(|x| / |y| > c) = 2 arctan(1 / c) / pi; the largest of two by counting
    if samples == 1:
        assert 2 / math.pi * math.atan(1 / error_factor(1, 1)) == pytest.approx(FALSE_ALARM, rel=0.01)
        return
    values = np.abs(np.random.default_rng(0).standard_normal((2, 1_000_000, 2))).max(axis=2)
    beyond = [(values[0] > c * values[1]).mean() for c in (10.0, 40.0)]
    # P falls as c**-n, so what was counted at c gives the c of FALSE_ALARM
    assert [c * math.sqrt(p / FALSE_ALARM) for c, p in zip((10.0, 40.0), beyond, strict=True)] == pytest.approx(
        [error_factor(2, 2)] * 2, rel=0.1
    )


@pytest.mark.parametrize(
    ("samples", "drawn", "freedom"), [(16, 4, 1), (16, 16, 1), (16, 48, 1), (8, 8, 2), (4, 12, 3), (4, 12, 24)]
)
def test_luck_is_the_quantile_of_simulated_errors(
    samples: int, drawn: int, freedom: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "LEAST_FACTOR", 0.5)
    monkeypatch.setattr(rules, "_error_factor", rules._error_factor.__wrapped__)  # others have called it without that
    errors = np.sqrt(np.random.default_rng(0).chisquare(freedom, (100_000, samples + drawn)))
    ratios = errors[:, :samples].max(-1) / errors[:, samples:].max(-1)
    assert error_factor(samples, drawn, freedom, chance=1e-2) == pytest.approx(np.quantile(ratios, 0.99), rel=0.02)


def test_an_unknown_dtype_has_no_allowance() -> None:
    with pytest.raises(KeyError):
        relative_allowance(rounding(0.0), 1.0, "int8")


def test_a_ratio_is_error_over_allowance_and_one_passes() -> None:
    assert ratio(1.0, 4.0) == 0.25
    assert ratio(0.0, 0.0) == ratio(0.0, 4.0) == 0.0
    assert ratio(1e-300, 0.0) == ratio(math.inf, 4.0) == math.inf
    assert passes(0.0)
    assert passes(1.0)
    assert not passes(math.nextafter(1.0, 2.0))
    assert math.isnan(ratio(math.nan, 4.0))
    for allowed in (0.0, 4.0, 1e300):
        assert not passes(ratio(math.nan, allowed))
        assert not passes(ratio(math.inf, allowed))


@given(st.integers(0, 1000), st.integers(0, 1000))
@settings(deadline=None)
def test_what_passes_is_what_is_off_no_more_than_allowed(error: int, allowed: int) -> None:
    assert passes(ratio(error / 8, allowed / 8)) == (error <= allowed)
