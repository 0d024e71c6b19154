"""What rounding makes in each element: the derivation of its limits, and what they let through."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from consistency.numerics import error_spread, rules, words
from consistency.numerics.error_spread import Spread, student

ROWS, COLUMNS = 48, 96


@pytest.mark.parametrize("freedom", [3, 5, 20, 200, 3000])
def test_students_limit_is_that_of_its_distribution(freedom: int) -> None:
    limit = student(freedom)
    x = np.exp(np.linspace(np.log(limit), np.log(limit) + 20, 200_001))
    log = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(log - (freedom + 1) / 2 * np.log1p(x * x / freedom))
    assert 2 * np.trapezoid(density, x) == pytest.approx(rules.FALSE_ALARM, rel=0.01)


def made(seed: int, passes: int = 3, *, together: float = 0.0) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Return exact values with a massive row and column, passes with noise, and a healthy device, float32.

    A share of each row's error is a common factor of the row.
    """
    generator = np.random.default_rng(seed)
    rows = np.exp(generator.normal(0, 1, (ROWS, 1)))
    columns = np.exp(generator.normal(0, 1, (1, COLUMNS)))
    rows[0], columns[0, 3] = 1000.0, 200.0
    exact = generator.normal(0, 1, (ROWS, COLUMNS)) * rows * columns

    def one() -> torch.Tensor:
        own = generator.normal(0, 1, exact.shape) * rows * columns
        common = generator.normal(0, 1, (ROWS, 1)) * exact
        return torch.from_numpy(exact + 1e-4 * ((1 - together) * own + together * common)).float()

    return torch.from_numpy(exact), [one() for _ in range(passes)], one()


@pytest.mark.parametrize("together", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("passes", [3, 8])
def test_a_healthy_device_is_within(passes: int, together: float) -> None:
    for seed in range(20):
        exact, drawn, device = made(seed, passes, together=together)
        figures = Spread.of(drawn, exact).figures(device, exact)
        assert figures.ratio < 0.9
        assert figures.word is None


def test_the_freedom_of_a_row_is_what_its_errors_share() -> None:
    alone, together = (Spread.of(made(1, together=share)[1], made(1, together=share)[0]) for share in (0.0, 1.0))
    assert alone.limits.freedom > 8 > 3 > together.limits.freedom
    assert alone.limits.row < together.limits.row


@pytest.mark.parametrize(
    ("kind", "smallest"), [("row", 5.0), ("element", 20.0), ("scale", 5e-5), ("massive element", 40.0)]
)
def test_each_figure_sees_its_fault(kind: str, smallest: float) -> None:
    """In units of what rounding makes there, and of the values for a scale."""
    exact, drawn, device = made(7)
    device, sizes = device.double(), torch.stack([(one - exact).abs() for one in drawn]).mean(0)
    if kind == "row":
        device[5] += smallest * sizes.mean(0) * sizes[5].mean() / sizes.mean()
    elif kind == "scale":
        device *= 1 + smallest
    else:
        row, column = (0, 3) if kind.startswith("massive") else (9, 40)
        device[row, column] += smallest * sizes[row].mean() * sizes[:, column].mean() / sizes.mean()
    figures = Spread.of(drawn, exact).figures(device.float(), exact)
    assert getattr(figures, kind.rpartition(" ")[2]) > 1
    if kind == "scale":
        assert figures.word == words.WRONG_SCALE


def test_what_is_allowed_is_the_limit_of_each_element() -> None:
    exact, drawn, device = made(2)
    spread = Spread.of(drawn, exact)
    ratio = ((device.double() - exact).abs() / spread.allowed(exact, torch.float32)).max()
    assert float(ratio) == pytest.approx(spread.figures(device, exact).element, rel=1e-6)


def test_a_large_tensor_in_parts_has_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, drawn, device = made(3)
    whole = Spread.of(drawn, exact)
    monkeypatch.setattr(error_spread, "_AT_ONCE", 5 * COLUMNS)
    monkeypatch.setattr(error_spread, "_MOST_KEPT_ERRORS", 0)
    parts = Spread.of(drawn, exact)
    assert parts.limits.row == pytest.approx(whole.limits.row)
    assert parts.figures(device, exact).ratio == pytest.approx(whole.figures(device, exact).ratio)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_same_nan_or_infinity_is_no_error_and_one_alone_is(value: float) -> None:
    exact, drawn, device = made(4)
    exact[2, 5] = value
    for one in (*drawn, device):
        one[2, 5] = value
    spread = Spread.of(drawn, exact)
    assert spread.figures(device, exact).ratio < 1
    device[3, 6] = value
    assert not spread.figures(device, exact).ratio <= 1


def test_what_is_zero_in_every_pass_is_zero_on_a_device() -> None:
    exact, drawn, device = made(5)
    for one in (exact, *drawn, device):
        one[10:20] = 0  # tokens that a mask leaves out
    spread = Spread.of(drawn, exact)
    assert spread.figures(device, exact).ratio < 1
    device[12, 4] = 1e-2
    assert spread.figures(device, exact).ratio > 1


def test_values_that_no_pass_rounds_are_right_to_one_rounding() -> None:
    exact = torch.from_numpy(np.random.default_rng(6).normal(0, 1, (8, 16)))
    stored = exact.to(torch.bfloat16)
    spread = Spread.of([stored, stored, stored], exact)
    assert spread.figures(stored, exact).ratio < 1
    assert spread.figures((exact * 1.05).to(torch.bfloat16), exact).ratio > 1


@pytest.mark.parametrize("overflow", [math.nan, math.inf])
@pytest.mark.parametrize("passes", [1, 3])
def test_passes_that_overflow_have_no_limits(overflow: float, passes: int) -> None:
    """As of a model in float16 whose values are too large for it: such a tensor is not judged."""
    exact = torch.randn(64, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = [(exact * (1 + 1e-3 * torch.randn_like(exact))).to(torch.float16) for _ in range(3)]
    for one in drawn[:passes]:
        one[3, 5] = overflow
    assert not math.isfinite(float(Spread.of(drawn, exact).limits.row))


def test_one_pass_shows_no_spread() -> None:
    with pytest.raises(ValueError, match="two passes"):
        Spread.of([torch.zeros(2, 2)], torch.zeros(2, 2, dtype=torch.float64))


def sums(seed: int, tokens: int, passes: int, shape: tuple[int, int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return an exact sum over tokens of products of two vectors, and sums whose vectors are rounded.

    One token has a vector a thousand times as large as the others'.
    """
    generator = np.random.default_rng(seed)
    left, right = generator.normal(0, 1, (tokens, shape[0])), generator.normal(0, 1, (tokens, shape[1]))
    left[0] *= 1000

    def one() -> torch.Tensor:
        errors = [1 + 1e-4 * generator.normal(0, 1, side.shape) for side in (left, right)]
        return torch.from_numpy((left * errors[0]).T @ (right * errors[1])).float()

    return torch.from_numpy(left.T @ right), [one() for _ in range(passes)]


@pytest.mark.parametrize("shape", [(4, 200), (200, 4), (1, 50), (60, 60)])
@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_a_healthy_sum_over_few_tokens_is_within(tokens: int, shape: tuple[int, int]) -> None:
    worst = 0.0
    for seed in range(40):
        exact, (device, *drawn) = sums(seed, tokens, 4, shape)
        spread = Spread.of(drawn, exact, of_a_sum=True)
        assert spread.limits.drawn <= 3 * min(shape)
        worst = max(worst, spread.figures(device, exact).ratio)
    assert worst < 0.95


def test_errors_that_are_multiples_of_one_are_one() -> None:
    """As of a massive token, whose vector is off by a factor: rows show nothing that one of them does not."""
    generator = np.random.default_rng(0)
    exact = torch.from_numpy(generator.normal(0, 1, (64, 8)))
    drawn = [(exact * (1 + 1e-4 * factor)).float() for factor in (0.6, -1.0, 0.8)]
    of_sum, of_tokens = (Spread.of(drawn, exact, of_a_sum=is_sum) for is_sum in (True, False))
    assert (of_sum.limits.drawn, of_tokens.limits.drawn) == (3, 192)
    device = (exact * (1 + 20e-4)).float()
    assert of_sum.figures(device, exact).ratio < 1 < of_tokens.figures(device, exact).ratio


def test_a_part_of_a_sum_has_the_limits_of_the_whole() -> None:
    exact, (device, *drawn) = sums(3, 30, 4, (200, 4))
    spread = Spread.of(drawn, exact, of_a_sum=True)
    assert spread.limits.by_columns
    part = spread.of_part(lambda tensor: tensor[50:90], (200, 4))
    allowed = spread.allowed(exact, torch.float32)
    assert allowed.shape == exact.shape
    assert torch.allclose(part.allowed(exact[50:90], torch.float32), allowed[50:90], rtol=1e-12)
    wrong = device.clone()
    wrong[60, 2] += 2000 * float((device - exact).abs().max())
    assert part.figures(device[50:90], exact[50:90]).ratio < 1 < part.figures(wrong[50:90], exact[50:90]).ratio


def test_figures_that_are_alike_by_chance_are_not_taken_for_many_degrees() -> None:
    """Of three figures nobody knows it; of a hundred nearly all is known."""
    few, many = torch.full((3,), 1.0).double(), torch.full((100,), 1.0).double()
    few += torch.tensor([0.0, 1e-2, -1e-2])
    many[::2] += 1e-2
    (best, chance), *others = error_spread._chances(few, 3, 64)
    assert (best, chance) == (64, rules.FALSE_ALARM)
    assert 1 in dict(others)
    assert error_spread._chances(many, 100, 64) == [(64, rules.FALSE_ALARM)] or 1 not in dict(
        error_spread._chances(many, 100, 64)
    )
