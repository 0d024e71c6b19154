"""The RMS norm of linkedin/Liger-Kernel (`test/transformers/test_rms_norm.py`), and its issue 74.

The kernel computed Gemma's norm without the offset of 1 of its weight. The test of those days had an atol of 5 in
bfloat16, which is more than the values are.
"""

from __future__ import annotations

import pytest
import torch

from consistency.testing import assert_within_rounding

BY_HAND = {torch.float32: (1e-4, 1e-7), torch.bfloat16: (5.0, 1e-5)}
"""atol and rtol of the original."""


def reference(x: torch.Tensor, weight: torch.Tensor, offset: float = 1.0, eps: float = 1e-6) -> torch.Tensor:
    """Compute Gemma's norm as transformers does."""
    wide = x.float()
    found = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (found * (offset + weight.float())).to(x.dtype)


class Kernel(torch.autograd.Function):
    """Compute row by row with a backward pass of its own, as the kernel does."""

    @staticmethod
    def forward(ctx, x, weight, offset, eps, forgets):  # type: ignore[no-untyped-def]  # torch's form
        wide = x.float()
        inverse = torch.rsqrt(wide.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset, ctx.forgets = offset, forgets
        return (wide * inverse * (weight.float() + offset)).to(x.dtype)

    @staticmethod
    def backward(ctx, up):  # type: ignore[no-untyped-def]  # torch's form
        x, weight, inverse = ctx.saved_tensors
        wide, scaled = x.float(), up.float() * (weight.float() + ctx.offset)
        shared = (scaled * wide).sum(-1, keepdim=True) * inverse.square() / x.shape[-1]
        of_x = inverse * (scaled - (0 if ctx.forgets else shared * wide))
        return of_x.to(x.dtype), (up.float() * wide * inverse).sum(0).to(weight.dtype), None, None, None


def kernel(x: torch.Tensor, weight: torch.Tensor, offset: float = 1.0, eps: float = 1e-6) -> torch.Tensor:
    """Call the kernel."""
    found: torch.Tensor = Kernel.apply(x, weight, offset, eps, False)  # type: ignore[no-untyped-call]
    return found


def forgetful(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Leave out of the gradient that the deviation depends on the row."""
    found: torch.Tensor = Kernel.apply(x, weight, 1.0, 1e-6, True)  # type: ignore[no-untyped-call]
    return found


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(48, 128, generator=generator), torch.randn(128, generator=generator) / 8


@pytest.mark.parametrize("dtype", BY_HAND, ids=str)
def test_the_kernel_is_gemmas_norm(dtype: torch.dtype) -> None:
    assert_within_rounding(kernel, *inputs(), reference=reference, dtype=dtype)


WRONG = {
    "no offset (issue 74)": lambda x, w: kernel(x, w, 0.0),
    "a deviation that is 2 % off": lambda x, w: kernel(x, w) * 1.02,
    "a gradient without its second term": forgetful,
}


@pytest.mark.parametrize("dtype", BY_HAND, ids=str)
@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_found(mistake: str, dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError, match="beyond what rounding may do"):
        assert_within_rounding(WRONG[mistake], *inputs(), reference=reference, dtype=dtype)


@pytest.mark.parametrize("mistake", WRONG)
def test_the_tolerance_by_hand_lets_them_pass(mistake: str) -> None:
    x, weight = (one.to(torch.bfloat16).requires_grad_() for one in inputs())
    atol, rtol = BY_HAND[torch.bfloat16]
    wrong, right = WRONG[mistake](x, weight), reference(x, weight)
    assert torch.allclose(wrong, right, atol=atol, rtol=rtol)
    gradients = [torch.autograd.grad(out, x, torch.ones_like(out))[0] for out in (wrong, right)]
    assert torch.allclose(gradients[0], gradients[1], atol=atol, rtol=rtol)
