"""Combinations that leave out elements: PEFT's are off float64 by what rounding makes, and others by more."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from peft.utils.merge_utils import magnitude_prune, ties

from consistency.devices.products import Products
from consistency.extras.peft_api.adapters.pruned import DENSITY, PRUNED, by_peft, rounding_of, undetermined
from consistency.numerics.dtype import name_of
from consistency.numerics.error import measure_against_exact
from consistency.numerics.rules import judge_relative

PEFTS = {"magnitude_prune": magnitude_prune, "ties": ties}

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def made(count: int, dtype: torch.dtype, *, seed: int = 0) -> list[torch.Tensor]:
    return list(torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 8, 40))).to(dtype))


def wide(tensors: list[torch.Tensor]) -> list[np.ndarray]:
    return [tensor.double().numpy() for tensor in tensors]


def share(kind: str, tensors: list[torch.Tensor], weights: list[float], actual: torch.Tensor) -> float:
    """Return the error over what is allowed."""
    files, own = wide(tensors), tensors[0].dtype
    assert not undetermined(kind, files)
    exact = by_peft(kind, files, weights, torch.float64)
    rounding = rounding_of(lambda: by_peft(kind, files, weights, own).to(actual.dtype), exact, Products())
    return judge_relative(measure_against_exact(actual, exact), name_of(actual.dtype), rounding).ratio


@pytest.mark.parametrize("kind", PRUNED)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_what_peft_computes_is_as_far_off_as_rounding_makes_it(kind: str, stored: torch.dtype, seed: int) -> None:
    """PEFT loads adapters in float32, and makes a combination in the dtype of the base."""
    tensors, weights = made(2, torch.float32, seed=seed), [math.sqrt(2.0), -1.0]
    actual = PEFTS[kind](tensors, torch.tensor(weights), DENSITY).to(stored)
    assert share(kind, tensors, weights, actual) <= 1


@pytest.mark.parametrize("kind", PRUNED)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_a_wrong_choice_is_outside(kind: str, stored: torch.dtype) -> None:
    tensors, weights = made(2, torch.float32), [1.0, 0.5]
    right = PEFTS[kind](tensors, torch.tensor(weights), DENSITY).to(stored)
    other_share = PEFTS[kind](tensors, torch.tensor(weights), DENSITY + 0.01).to(stored)
    swapped = PEFTS[kind](tensors, torch.tensor(weights[::-1]), DENSITY).to(stored)
    for wrong in (other_share, swapped, right * 1.03, right.flip(0)):
        assert share(kind, tensors, weights, wrong) > 1


def test_a_sign_by_the_number_of_adapters_is_another() -> None:
    tensors, weights = made(2, torch.float32), [1.0, 0.5]
    assert share("ties", tensors, weights, ties(tensors, torch.tensor(weights), DENSITY, "frequency")) > 1


@pytest.mark.parametrize("kind", PRUNED)
def test_equal_magnitudes_at_the_limit_are_not_compared_with_float64(kind: str) -> None:
    """A device may keep any of them; zeros, of a factor that was not trained, are the same either way."""
    rounded = [tensor.round(decimals=1) for tensor in made(2, torch.float32)]
    assert "equally large" in undetermined(kind, wide(rounded))
    assert "equally large" in undetermined(kind, wide(made(2, torch.bfloat16)))
    assert not undetermined(kind, [np.zeros((8, 40))] * 2)
    assert not undetermined(kind, wide(made(2, torch.float32)))


def test_a_sign_that_rounding_may_elect_is_not_compared_with_float64() -> None:
    tensors = wide(made(3, torch.float32))
    assert "which sign" in undetermined("ties", tensors)
    assert not undetermined("magnitude_prune", tensors)


@pytest.mark.parametrize("kind", PRUNED)
def test_zeros_are_right_where_all_is_zero(kind: str) -> None:
    zeros = [torch.zeros(8, 40)] * 2
    assert share(kind, zeros, [1.0, 0.5], torch.zeros(8, 40)) == 0
    assert share(kind, zeros, [1.0, 0.5], torch.full((8, 40), 1e-30)) > 1
