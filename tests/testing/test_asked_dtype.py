"""References that ask for the dtype of a tensor, in the pass that is in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from consistency.testing import within_rounding
from consistency.testing.asked_dtype import AskedDtype, claim_dtype
from tests.testing.functions import drawn

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def with_default_epsilon(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight)


def with_epsilon(eps: float) -> Callable[..., torch.Tensor]:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    return norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_with_its_default_epsilon_has_that_of_the_tested_dtype(dtype: torch.dtype) -> None:
    eps = torch.finfo(torch.float32).eps  # which torch takes for half types, too
    x, weight = drawn(16, 64) * eps**0.5, drawn(64, seed=1)
    default = within_rounding(with_default_epsilon, x, weight, dtype=dtype)
    assert default, str(default)
    assert within_rounding(with_epsilon(eps), x, weight, dtype=dtype, reference=with_default_epsilon)
    none_at_all = within_rounding(with_epsilon(1e-16), x, weight, dtype=dtype, reference=with_default_epsilon)
    assert none_at_all.status == "outside"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_of_the_smallest_number_is_that_of_the_tested_dtype(dtype: torch.dtype) -> None:
    causal = torch.ones(8, 8, dtype=torch.bool).triu(1)

    def masked(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(causal, torch.finfo(x.dtype).min)

    def added(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(8, 8, dtype=x.dtype).masked_fill(causal, torch.finfo(x.dtype).min)
        return (x + mask).softmax(-1)

    assert within_rounding(masked, drawn(8, 8), dtype=dtype)
    assert within_rounding(added, drawn(8, 8), dtype=dtype)
    unmasked = within_rounding(lambda x: x.softmax(-1), drawn(8, 8), dtype=dtype, reference=added)
    assert unmasked.status == "outside"


def test_a_branch_by_dtype_is_that_of_the_tested_dtype() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if x.dtype == torch.bfloat16 else 3.0)

    def only_half(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.bfloat16
        assert x.element_size() == 2
        return (x.float() * 2).to(x.dtype)

    x = drawn(8, 8)
    assert within_rounding(lambda x: x * 2, x, reference=scaled, dtype=torch.bfloat16)
    assert not within_rounding(lambda x: x * 3, x, reference=scaled, dtype=torch.bfloat16)
    assert within_rounding(only_half, x, dtype=torch.bfloat16)


def test_the_answer_follows_casts_and_promotion() -> None:
    x, scale = drawn(4, 4).double(), torch.tensor(2.0, dtype=torch.float64)
    claim_dtype(x, torch.bfloat16)
    claim_dtype(scale, torch.float32)
    with AskedDtype(torch.bfloat16):
        assert x.dtype == torch.bfloat16
        assert (x * 2).sum(-1).dtype == torch.bfloat16
        wide = x.double()
        assert wide.dtype == torch.float64
        assert (x + wide).dtype == torch.float64
        assert (x * scale).dtype == torch.bfloat16  # a number without a dimension yields
        assert (x.mean() * scale).dtype == torch.float32
        assert x.to(wide).dtype == torch.float64
        assert wide.type_as(x).dtype == torch.bfloat16
        assert [part.dtype for part in x.split(2)] == [torch.bfloat16] * 2
        x.mul_(wide)
        assert x.dtype == torch.bfloat16
        assert torch.arange(4).dtype == torch.int64
    assert x.dtype == torch.float64
