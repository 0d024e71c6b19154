"""A sum of deltas that is cut: PEFT's steps are within the bound, in any order of close values; another cut is not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from peft.utils import merge_utils

from consistency.extras.peft_api.adapters.layer_factors import LayerFactors
from consistency.extras.peft_api.adapters.truncated import Judged, combined_delta, judge, share_orthonormal
from consistency.numerics.running_error import Arithmetic

RANK, SHAPE, WEIGHTS, SCALINGS = 4, (48, 80), (1.0, 0.875), (2.0, 0.5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Pair = tuple[torch.Tensor, torch.Tensor]


def made(dtype: torch.dtype, *, seed: int = 0) -> LayerFactors:
    numbers = np.random.default_rng(seed)

    def stored(*shape: int) -> np.ndarray:
        values = torch.from_numpy(numbers.normal(size=shape)).to(dtype)
        return np.asarray(values.double())

    return LayerFactors(
        parts=("lora_A", "lora_B"), names=("one", "two"), weights=WEIGHTS, scalings=SCALINGS,
        a=(stored(RANK, SHAPE[1]), stored(RANK, SHAPE[1])), b=(stored(SHAPE[0], RANK), stored(SHAPE[0], RANK)),
        dtype=dtype, is_transposed=False,
    )  # fmt: skip


def deltas_of(factors: LayerFactors) -> list[torch.Tensor]:
    wide = torch.float64 if factors.dtype == torch.float64 else torch.float32
    return [
        (torch.from_numpy(b).to(wide) @ torch.from_numpy(a).to(wide) * scaling).to(factors.dtype)
        for a, b, scaling in zip(factors.a, factors.b, factors.scalings, strict=True)
    ]


def combined(factors: LayerFactors, *, swapped: bool = False) -> torch.Tensor:
    """Combine by PEFT's own function."""
    weights = torch.tensor(WEIGHTS[::-1] if swapped else WEIGHTS)
    found: torch.Tensor = merge_utils.task_arithmetic(deltas_of(factors), weights)
    return found


def cut(delta: torch.Tensor, rank: int = RANK, *, first: int = 0) -> Pair:
    u, s, v = torch.linalg.svd(delta, full_matrices=True)
    kept = slice(first, first + rank)
    return v[kept], u[:, kept] @ torch.diag(s[kept])


def judged(factors: LayerFactors, pair: Pair) -> Judged:
    delta = combined_delta(Arithmetic.of(factors.dtype), factors)
    return judge(delta, Arithmetic.of(pair[0].dtype), pair[0].double(), pair[1].double())


def worst(found: Judged) -> float:
    return max(found.share_a, found.share_b, found.share_values, found.share_orthonormal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_peft_computes_is_within_the_bound(dtype: torch.dtype) -> None:
    factors = made(dtype)
    found = judged(factors, cut(combined(factors)))
    assert worst(found) <= 1
    assert found.is_cut_sure or dtype == torch.bfloat16


FAULTS: dict[str, Callable[[torch.Tensor], Pair]] = {
    "one value fewer": lambda delta: (cut(delta)[0], cut(delta)[1] * torch.tensor([1.0, 1.0, 1.0, 0.0])),
    "not the largest": lambda delta: cut(delta, first=1),
    "values left out": lambda delta: (cut(delta)[0], cut(delta)[1] / torch.linalg.vector_norm(cut(delta)[1], dim=0)),
    "two vectors swapped": lambda delta: (cut(delta)[0][[1, 0, 2, 3]], cut(delta)[1]),
    "one vector twice": lambda delta: (cut(delta)[0][[0, 0, 2, 3]], cut(delta)[1][:, [0, 0, 2, 3]]),
    "a percent": lambda delta: (cut(delta)[0], cut(delta)[1] * 1.01),
    "other elements": lambda delta: cut(delta.flip(0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_cut_is_outside(fault: str) -> None:
    factors = made(torch.float32)
    assert worst(judged(factors, FAULTS[fault](combined(factors)))) > 1


def test_another_combination_is_outside() -> None:
    factors = made(torch.float32)
    assert worst(judged(factors, cut(combined(factors, swapped=True)))) > 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_orthonormal_are_outside_without_a_combination(dtype: torch.dtype) -> None:
    """As is known of the types whose deltas lose elements before they are cut."""
    a, _ = cut(combined(made(torch.float64)))
    by = Arithmetic.of(dtype)
    assert share_orthonormal(by, a.to(dtype).double(), max(SHAPE)) <= 1
    assert share_orthonormal(by, (a * 2).to(dtype).double(), max(SHAPE)) > 1
    assert share_orthonormal(by, a[[0, 0, 2, 3]].to(dtype).double(), max(SHAPE)) > 1


def test_directions_of_equal_singular_values_are_not_determined() -> None:
    """Any orthonormal basis is right, and a cut between equal values too; one that keeps a smaller value is not."""
    left, right = (
        torch.linalg.qr(torch.randn(48, 6, dtype=torch.float64)).Q,
        torch.linalg.qr(torch.randn(80, 6, dtype=torch.float64)).Q,
    )
    values = torch.tensor([5.0, 3, 3, 3, 3, 1], dtype=torch.float64)
    delta = Arithmetic.of(torch.float32).known((left * values @ right.T).numpy())
    turn = torch.block_diag(torch.eye(1), torch.linalg.qr(torch.randn(4, 4)).Q, torch.eye(1)).double()
    a, b = (right @ turn).T.float(), (left @ turn * values).float()
    for kept, is_right in (([0, 1, 2, 3], True), ([0, 2, 3, 4], True), ([0, 1, 2, 5], False)):
        found = judge(delta, Arithmetic.of(torch.float32), a[kept].double(), b[:, kept].double())
        assert (worst(found) <= 1) is is_right
        assert not found.is_cut_sure
