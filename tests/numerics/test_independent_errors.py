"""How many independent errors are behind the largest one."""

from __future__ import annotations

import pytest
import torch

from consistency.numerics import independent_errors
from consistency.numerics.independent_errors import independent_lines


def test_independent_errors_are_the_fewer_of_rows_and_columns() -> None:
    exact = torch.zeros(4, 8, 64, dtype=torch.float64)
    errors = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(0)).double() * 1e-6
    assert 20 <= independent_lines(errors, exact) <= 32
    column = torch.zeros_like(errors)
    column[:, :, 3] = errors[:, :, 3]
    assert independent_lines(column, exact) <= 4, "one column carries all: of each pass"
    one_pass = errors * torch.tensor([1.0, 0, 0, 0])[:, None, None]
    assert independent_lines(one_pass, exact) <= 8
    assert independent_lines(errors[:, 0], exact[:, 0]) <= 4, "a vector is one row of each pass"


def test_a_matrix_is_counted_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.zeros(2, 30, 20, dtype=torch.float64)
    errors = torch.randn(2, 30, 20, generator=torch.Generator().manual_seed(2)).double()
    whole = independent_lines(errors, exact)
    monkeypatch.setattr(independent_errors, "_ELEMENTS_AT_ONCE", 70)
    assert independent_lines(errors, exact) == whole


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_counts_as_one(value: float) -> None:
    exact = torch.zeros(1, 4, 4, dtype=torch.float64)
    errors = exact.clone()
    errors[0, 1, 2] = value
    assert independent_lines(errors, exact) >= 1


@pytest.mark.parametrize("shape", [(1, 0, 4), (1, 4, 0), (1, 0)])
def test_what_is_empty_has_one(shape: tuple[int, ...]) -> None:
    """A layer that was pruned to rank 0 has such gradients."""
    assert independent_lines(torch.zeros(shape), torch.zeros(shape)) >= 1
