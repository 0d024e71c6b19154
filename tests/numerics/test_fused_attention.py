"""Attention in blocks: the same function, with the rounding errors of a fused kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from consistency.numerics.fused_attention import BLOCK, FusedAttention
from consistency.numerics.rounding_noise import RoundingNoise
from consistency.worker import determinism

Context = Callable[[], AbstractContextManager[object]]
HEADS, SIZE = 4, 64


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, dtype=np.float32))


def operands(tokens: int, dtype: torch.dtype, heads: int = HEADS) -> list[torch.Tensor]:
    """Return queries, keys, values and a gradient; most tokens attend to the first one, as in trained models."""
    q, k, v = (normal(2, n, tokens, SIZE, seed=i) for i, n in enumerate((HEADS, heads, heads)))
    k[:, :, 0] *= 4
    return [(2 * q).to(dtype), k.to(dtype), v.to(dtype), normal(2, HEADS, tokens, SIZE, seed=3).to(dtype)]


def computed(given: list[torch.Tensor], context: Context = nullcontext, **options: Any) -> list[torch.Tensor]:
    """Return the output, and the gradients of queries, keys and values."""
    query, key, value, up = [t.clone() for t in given]
    leaves = [t.requires_grad_() for t in (query, key, value)]
    with context():
        output = functional.scaled_dot_product_attention(query, key, value, **options)
        return [output.detach(), *torch.autograd.grad(output, leaves, up)]


def noisy(seed: int, *, fused: bool) -> Context:
    @contextmanager
    def context() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(determinism.switched(sdpa_math=True, sdpa_flash=False, sdpa_mem_efficient=False))
            if fused:
                stack.enter_context(FusedAttention())
            stack.enter_context(RoundingNoise(seed))
            yield

    return context


def rms(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).square().mean().sqrt())


MASK = torch.ones(100, 100, dtype=torch.bool).tril() & (torch.arange(100) != 70)


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        (HEADS, {}),
        (HEADS, {"is_causal": True, "scale": 0.3}),
        (2, {"is_causal": True, "enable_gqa": True}),
        (HEADS, {"attn_mask": MASK}),
        (HEADS, {"attn_mask": torch.where(MASK, 0.0, -math.inf)}),
        (1, {"attn_mask": torch.linspace(-3, 3, 100)[None, None, None], "enable_gqa": True}),
    ],
)
def test_it_is_the_function_of_torch(heads: int, options: dict[str, Any]) -> None:
    assert BLOCK < 100 < 2 * BLOCK, "a block is not full"
    given = operands(100, torch.float32, heads)
    wide: dict[str, Any] = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in options.items()
    }
    exact = computed([t.double() for t in given], **wide)
    for found, wanted in zip(computed(given, FusedAttention, **options), exact, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_its_gradients_have_the_error_of_a_fused_kernel_which_the_formula_has_not(dtype: torch.dtype) -> None:
    """The CPU's own kernel is one: what no noise on the formula shows must not be a finding."""
    given = operands(40, dtype)
    exact = computed([t.double() for t in given], is_causal=True)
    kernel, fused, formula = (
        [rms(found, wanted) for found, wanted in zip(computed(given, context, is_causal=True), exact, strict=True)]
        for context in (nullcontext, noisy(1, fused=True), noisy(1, fused=False))
    )
    for of_query_or_key in (1, 2):
        assert kernel[of_query_or_key] / formula[of_query_or_key] > 2
    assert all(0.7 < a / b < 1.5 for a, b in zip(kernel, fused, strict=True))


def test_in_float32_it_covers_the_kernel_by_no_more_than_noise_does() -> None:
    given = operands(40, torch.float32)
    exact = computed([t.double() for t in given], is_causal=True)
    kernel, fused = computed(given, is_causal=True), computed(given, noisy(1, fused=True), is_causal=True)
    assert all(1 < rms(a, x) / rms(b, x) < 4 for a, b, x in zip(fused, kernel, exact, strict=True))


def test_a_mask_with_a_gradient_keeps_it() -> None:
    query, key, value, _ = operands(8, torch.float32)
    bias = torch.zeros(8, 8, requires_grad=True)
    with FusedAttention():
        functional.scaled_dot_product_attention(query, key, value, attn_mask=bias).sum().backward()
    assert bias.grad is not None
