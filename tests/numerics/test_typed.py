"""Bounds that follow torch's dtypes step by step: what torch computes is within them, and no more is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from consistency.numerics.dtype import HALF_SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from consistency.numerics.running_error import Arithmetic
from consistency.numerics.typed import Typed, half_ulp, tucker

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape) * scale).to(dtype)


def share(actual: torch.Tensor, exact: Typed) -> float:
    """Return the largest error in units of what is allowed."""
    assert actual.dtype == exact.dtype
    off = np.abs(actual.to(torch.float64).numpy() - exact.value)
    return float(np.max(np.divide(off, exact.allowed, out=np.zeros_like(off), where=off > 0)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e3])
def test_half_a_unit_in_the_last_place_is_the_largest_error_of_a_conversion(dtype: torch.dtype, scale: float) -> None:
    exact = np.random.default_rng(0).standard_normal(4096) * scale
    if np.abs(exact).max() > torch.finfo(dtype).max:
        return
    rounded = torch.from_numpy(exact).to(dtype).to(torch.float64).numpy()
    allowed = half_ulp(np.abs(exact), dtype)
    assert (np.abs(rounded - exact) <= allowed).all()
    if dtype != torch.float64 and np.abs(exact).min() > torch.finfo(dtype).tiny:
        assert (np.abs(rounded - exact) / allowed).max() > 0.99


def test_zero_is_rounded_by_nothing_but_the_smallest_number() -> None:
    assert half_ulp(np.zeros(1), torch.float16) == HALF_SMALLEST_SUBNORMAL[torch.float16]
    assert half_ulp(np.ones(1), torch.float32) == UNIT_ROUNDOFF[torch.float32]
    assert half_ulp(np.array([1.999]), torch.float32) == UNIT_ROUNDOFF[torch.float32]


@pytest.mark.parametrize("left", DTYPES)
@pytest.mark.parametrize("right", DTYPES)
@pytest.mark.parametrize(
    "step", [lambda a, b: a + b, lambda a, b: a * b, lambda a, b: a / b], ids=["sum", "product", "quotient"]
)
def test_a_step_in_any_two_dtypes(left: torch.dtype, right: torch.dtype, step: Callable[..., Any]) -> None:
    a, b = values((64, 32), left, 1), values((64, 32), right, 2).abs() + 0.1
    exact = step(Typed.known(a), Typed.known(b))
    assert share(step(a, b), exact) <= 1
    stored = exact.to(left)
    assert share(step(a, b).to(left), stored) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.5, 0.3, 6 / 7])
def test_a_number_of_the_program(dtype: torch.dtype, scale: float) -> None:
    a = values((64, 32), dtype)
    assert share(a * scale, Typed.known(a).scaled(scale)) <= 1
    assert share(a * torch.tensor(scale), Typed.known(a).scaled(scale, held_in=torch.float32)) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_of_products(dtype: torch.dtype) -> None:
    a, b, c = values((24, 8), dtype, 1), values((8, 40), dtype, 2), values((24, 40), dtype, 3)
    exact = (Typed.known(a).matmul(Typed.known(b), Arithmetic.of) * Typed.known(c)).scaled(0.3)
    assert share((a @ b) * c * 0.3, exact) <= 1
    if dtype != torch.float64:
        assert share((a @ b) * c * 0.3, exact) > 0.05
        assert share((a @ b) * c * (0.3 * (1 + 16 * UNIT_ROUNDOFF[dtype])), exact) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_orders_of_two_sums_are_within(dtype: torch.dtype) -> None:
    core, rows, columns = values((4, 4, 9), dtype, 1), values((4, 24), dtype, 2), values((4, 16), dtype, 3)
    exact = tucker(Typed.known(core), Typed.known(rows), Typed.known(columns), Arithmetic.of)
    first = torch.einsum("irk,ip->prk", torch.einsum("ijk,jr->irk", core, columns), rows)
    second = torch.einsum("pjk,jr->prk", torch.einsum("ijk,ip->pjk", core, rows), columns)
    assert share(first, exact) <= 1
    assert share(second, exact) <= 1
    assert share(first.flip(0), exact) > 1


def test_widening_rounds_nothing() -> None:
    a = Typed.known(values((8,), torch.bfloat16))
    assert not a.to(torch.float32).error.any()
    assert a.to(torch.float16).error.any()  # bfloat16 has smaller numbers
