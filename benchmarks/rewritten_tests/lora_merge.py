"""A LoRA that is merged, as huggingface/peft tests it, and its issues 2486 and 3741.

`lora_bias` came with pull request 2237, which says of its tests that they "would pass even if the bias was omitted
while merging". The bias was merged without its scale: found by a reader in April 2025 for plain layers (2486), and for
those of bitsandbytes in September 2026 (3741).
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from consistency.testing import assert_within_rounding

BY_HAND = (0.01, 10.0)
"""atol and rtol of the original for bitsandbytes layers, between the softmax of outputs."""

SCALE = 8.0


def unmerged(x: torch.Tensor, *layer: torch.Tensor) -> torch.Tensor:
    """Compute the layer and its adapter beside it: what merging has to keep."""
    weight, bias, a, b, lora_bias = layer
    return functional.linear(x, weight, bias) + SCALE * (functional.linear(functional.linear(x, a), b) + lora_bias)


def merged(x: torch.Tensor, *layer: torch.Tensor, of_bias: float = SCALE, of_delta: float = SCALE) -> torch.Tensor:
    """Add the adapter to the weight and to the bias, and compute the layer."""
    weight, bias, a, b, lora_bias = layer
    return functional.linear(x, weight + of_delta * (b @ a), bias + of_bias * lora_bias)


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, size: float) -> torch.Tensor:
        return size * torch.randn(*shape, generator=generator)

    return [
        drawn(24, 64, size=1.0), drawn(64, 64, size=0.1), drawn(64, size=0.1), drawn(4, 64, size=0.05),
        drawn(64, 4, size=0.05), drawn(64, size=0.01),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merging_keeps_the_function(dtype: torch.dtype) -> None:
    assert_within_rounding(merged, *inputs(), reference=unmerged, dtype=dtype)


WRONG = {
    "a bias without its scale (issues 2486, 3741)": lambda *given: merged(*given, of_bias=1.0),
    "no bias": lambda *given: merged(*given, of_bias=0.0),
    "a delta without its scale": lambda *given: merged(*given, of_delta=1.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_found(mistake: str, dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError, match="beyond what rounding may do"):
        assert_within_rounding(WRONG[mistake], *inputs(), reference=unmerged, dtype=dtype, gradients=False)


@pytest.mark.parametrize("mistake", WRONG)
def test_the_tolerance_by_hand_lets_them_pass(mistake: str) -> None:
    atol, rtol = BY_HAND
    wrong, right = (function(*inputs()).softmax(-1) for function in (WRONG[mistake], unmerged))
    assert torch.allclose(wrong, right, atol=atol, rtol=rtol)
