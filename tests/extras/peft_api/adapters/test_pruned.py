"""Combinations that leave out elements: PEFT's own are within the bound, and another choice is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from peft.utils.merge_utils import magnitude_prune, ties

from consistency.extras.peft_api.adapters.pruned import DENSITY, MOST_TIED, PRUNED, pruned
from consistency.numerics.running_error import Arithmetic

PEFTS = {"magnitude_prune": magnitude_prune, "ties": ties}

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def made(count: int, dtype: torch.dtype, *, seed: int = 0, digits: int | None = None) -> list[torch.Tensor]:
    """Make factors; with few digits many elements have equal magnitudes."""
    values = np.random.default_rng(seed).normal(size=(count, 8, 40))
    return list(torch.from_numpy(values if digits is None else values.round(digits)).to(dtype))


def share(kind: str, tensors: list[torch.Tensor], weights: list[float], actual: torch.Tensor) -> float:
    """Return the largest share of what is allowed."""
    wide = [tensor.double().numpy() for tensor in tensors]
    exact = pruned(kind, Arithmetic.of(actual.dtype), wide, weights, actual.double().numpy())
    assert exact is not None
    return float(np.max(np.abs(actual.double().numpy() - exact.value) / np.maximum(exact.allowed, 1e-300)))


@pytest.mark.parametrize("kind", PRUNED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("digits", [None, 1])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_what_peft_computes_is_within_the_bound(kind: str, dtype: torch.dtype, digits: int | None, count: int) -> None:
    tensors = made(count, dtype, digits=digits)
    weights = [math.sqrt(2.0 / (number + 1)) * (-1) ** number for number in range(count)]
    actual = PEFTS[kind](tensors, torch.tensor(weights), DENSITY).to(dtype)
    assert share(kind, tensors, weights, actual) <= 1


@pytest.mark.parametrize("kind", PRUNED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wrong_choice_is_outside(kind: str, dtype: torch.dtype) -> None:
    tensors, weights = made(3, dtype), [1.0, 0.5, 0.7]
    right = PEFTS[kind](tensors, torch.tensor(weights), DENSITY).to(dtype)
    other_share = PEFTS[kind](tensors, torch.tensor(weights), DENSITY + 0.01).to(dtype)
    swapped = PEFTS[kind](tensors, torch.tensor(weights[::-1]), DENSITY).to(dtype)
    for wrong in (other_share, swapped, right * 1.02, right.flip(0)):
        assert share(kind, tensors, weights, wrong) > 1


def test_a_sign_by_the_number_of_adapters_is_another() -> None:
    tensors, weights = made(3, torch.float32), [1.0, 0.5, 0.7]
    assert share("ties", tensors, weights, ties(tensors, torch.tensor(weights), DENSITY, "frequency")) > 1


def test_too_many_ties_are_not_judged() -> None:
    tensors = [tensor.sign().double().numpy() for tensor in made(MOST_TIED + 1, torch.float32)]
    by = Arithmetic.of(torch.float32)
    assert pruned("ties", by, tensors, [1.0] * len(tensors), np.zeros((8, 40))) is None
