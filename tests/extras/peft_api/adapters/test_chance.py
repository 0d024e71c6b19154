"""Combinations that leave out elements by chance: PEFT's are within the bound given its draws, and others are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from peft.utils import merge_utils

from consistency.extras.peft_api.adapters.chance import BY_CHANCE, FALSE_ALARM, chosen, drawing, share_of_chance
from consistency.extras.peft_api.adapters.pruned import DENSITY
from consistency.numerics.running_error import Arithmetic
from tests.versions import needs_peft

PEFTS: dict[str, Callable[..., torch.Tensor]] = {
    "dare_linear": merge_utils.dare_linear, "dare_ties": merge_utils.dare_ties,
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def made(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    values = np.random.default_rng(0).normal(size=(count, 8, 40))
    values[:, 0] = 0  # a factor B that was not trained
    return list(torch.from_numpy(values).to(dtype))


def share(
    kind: str, tensors: list[torch.Tensor], masks: list[torch.Tensor], weights: list[float], actual: torch.Tensor
) -> float:
    by = Arithmetic.of(actual.dtype)
    wide = [tensor.double().numpy() for tensor in tensors]
    exact = chosen(kind, by, wide, [mask.numpy() for mask in masks], weights)
    assert not exact.allowed[np.stack(wide).any(0) == 0].max() > 1e-6  # zeros stay zeros
    return float(np.max(np.abs(actual.double().numpy() - exact.value) / np.maximum(exact.allowed, 1e-300)))


@needs_peft(0, 19, to="divide what it keeps by the density")
@pytest.mark.parametrize("kind", BY_CHANCE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_what_peft_computes_is_within_the_bound(kind: str, dtype: torch.dtype, count: int) -> None:
    tensors = made(count, dtype)
    weights = [math.sqrt(2.0 / (number + 1)) * (-1) ** number for number in range(count)]
    with drawing() as draws:
        actual = PEFTS[kind](tensors, torch.tensor(weights), DENSITY).to(dtype)
    assert len(draws.kept) == count
    assert share(kind, tensors, draws.kept, weights, actual) <= 1


@needs_peft(0, 19, to="divide what it keeps by the density")
@pytest.mark.parametrize("kind", BY_CHANCE)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_another_value_is_outside(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, weights = made(2, dtype), [1.0, 0.5]

    def computed(weights: list[float], density: float = DENSITY) -> torch.Tensor:
        return PEFTS[kind](tensors, torch.tensor(weights), density).to(dtype)

    with drawing() as draws:
        right = computed(weights)
    with drawing():
        swapped = computed(weights[::-1])
    with drawing():
        other_density = computed(weights, 1 - DENSITY)
    real = merge_utils.random_pruning
    monkeypatch.setattr(merge_utils, "random_pruning", lambda *args, rescale: real(*args, rescale=not rescale))
    with drawing():
        not_rescaled = computed(weights)
    for wrong in (swapped, other_density, not_rescaled, right * 1.02, right.flip(1)):
        assert share(kind, tensors, draws.kept, weights, wrong) > 1


def test_draws_repeat_and_leave_generators_as_they_were() -> None:
    before, found = torch.get_rng_state(), []
    for _ in range(2):
        with drawing() as draws:
            torch.bernoulli(torch.full((100,), DENSITY))
        found.append(draws.kept[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(before, torch.get_rng_state())


def test_the_share_that_chance_explains() -> None:
    draws = 100_000
    for seed in range(20):
        kept = int(np.random.default_rng(seed).binomial(draws, DENSITY))
        assert share_of_chance(kept, draws, DENSITY) < 0.7
    assert share_of_chance(int(draws * 0.72), draws, DENSITY) > 1
    assert share_of_chance(0, 0, DENSITY) == 0
    limit = math.sqrt(math.log(2 / FALSE_ALARM) / (2 * draws))
    assert math.isclose(2 * math.exp(-2 * draws * limit**2), FALSE_ALARM)
