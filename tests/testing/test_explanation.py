"""What a failure says is wrong, beside its figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from consistency.testing import ResultError, WithinRounding, within_rounding
from tests.testing.functions import drawn, twice

Wrong = Callable[[torch.Tensor], torch.Tensor]


def judged(wrong: Wrong, x: torch.Tensor, dtype: torch.dtype | None = None) -> WithinRounding:
    return within_rounding(lambda x: wrong(x * 2), x, reference=twice, gradients=False, dtype=dtype)


def with_factor(place: tuple[int | slice, ...], factor: float) -> Wrong:
    def wrong(values: torch.Tensor) -> torch.Tensor:
        values[place] *= factor
        return values

    return wrong


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (with_factor((3, 7), 1.01), "1 of 256 elements"),
        (with_factor((3, 7), 1.5), "1 of 256 elements"),
        (with_factor((3,), 1.01), "16 of 256 elements, all in rows 3 of 16"),
        (with_factor((slice(None), 2), 1.01), "16 of 256 elements, all in columns 2 of 16"),
        (lambda y: y * 1.01, "got = 1.01 × exact"),
        (lambda y: -y, "got = -1 × exact"),
        (lambda y: y * 0, "all are zero"),
        (lambda y: y.mT, "it is the exact result transposed"),
        (lambda y: y.roll(1, 0), "it is the exact result shifted by 1 along dimension 0"),
        (lambda y: torch.cat([y[:, 1:], y[:, :1] * 5], 1), "it is the exact result shifted by -1 along dimension 1"),
        (lambda y: y.flip(1), "it is the exact result reversed along dimension 1"),
        (lambda y: y.bfloat16().float(), "all values are rounded to bfloat16"),
        (lambda y: y.where(y < 2, torch.nan), "NaN"),
        (lambda y: y + drawn(16, 16, seed=1), "256 of 256 elements, in 16 of 16 rows"),
    ],
)
def test_a_failure_says_what_is_wrong(wrong: Wrong, said: str) -> None:
    judgement = judged(wrong, drawn(16, 16))
    assert judgement.status == "outside"
    assert said in str(judgement)


def test_a_cause_is_not_named_where_it_does_not_explain_all() -> None:
    def factor_in_most_rows(y: torch.Tensor) -> torch.Tensor:
        return torch.cat([y[:12] * 1.01, y[12:]])

    text = str(judged(factor_in_most_rows, drawn(16, 16)))
    assert "192 of 256 elements, in 12 of 16 rows" in text
    assert "× exact" not in text


def test_a_healthy_result_has_no_explanation() -> None:
    assert {result.explanation for result in judged(lambda y: y, drawn(16, 16)).results} == {""}


def test_the_values_of_another_result_are_named() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, y * 3

    def exchanged(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = both(x, y)
        return second, first

    judgement = within_rounding(exchanged, drawn(8, 8), drawn(8, 8, seed=1), reference=both, gradients=False)
    assert "64 of 64 elements, in 8 of 8 rows: it is the exact result[1]" in str(judgement)


def test_an_error_beside_a_value_that_cancels_is_not_told_in_units_of_it() -> None:
    x = drawn(8, 8)
    x[2, 3] = 0

    def one_wrong(y: torch.Tensor) -> torch.Tensor:
        y[2, 3] = 1
        return y

    text = str(judged(one_wrong, x))
    assert "error 1, allowed" in text
    assert "ulp" not in text
    assert "ulp" in str(judged(lambda y: y * 1.01, x))


def test_one_line_stands_for_a_judgement_where_pytest_shows_it() -> None:
    wrong = judged(lambda y: y * 1.01, drawn(16, 16))
    assert "result: outside, 256 of 256 elements, in 16 of 16 rows: got = 1.01 × exact" in repr(wrong)
    many = tuple(ResultError(name="result", status="outside", reason="a long reason" * 50) for _ in range(3))
    long = repr(WithinRounding(name="many", results=many))
    assert long.endswith(", and 2 more>")
    assert len(long) < 240
    assert repr(judged(lambda y: y, drawn(8, 8))).startswith("<within rounding: <lambda> (float32, cpu, 8 passes")
