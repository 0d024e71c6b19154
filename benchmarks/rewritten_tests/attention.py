"""Attention in blocks, as Dao-AILab/flash-attention tests it (`tests/test_flash_attn.py`), and its issues 581 and 1231.

A causal mask of fewer queries than keys was aligned at the top left, and tokens saw too little (581). The test allows
twice the largest error of torch's own attention in the same dtype: that error is 0 by luck in issues 1136 and 1231,
where healthy kernels failed.
"""

from __future__ import annotations

import math

import pytest
import torch

from consistency.testing import assert_within_rounding

QUERIES, KEYS, SIZE = 24, 40, 32


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute attention by its formula; the last query sees the last key."""
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
    return (scores.masked_fill(~mask, -math.inf).softmax(-1).to(q.dtype) @ v).to(q.dtype)


def in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, shift: int = KEYS - QUERIES, rescales: bool = True
) -> torch.Tensor:
    """Go through the keys eight at a time with a running maximum."""
    wide = q.float() / math.sqrt(q.shape[-1])
    largest = torch.full((*q.shape[:-1], 1), -1e30)
    total, output = torch.zeros_like(largest), torch.zeros(*q.shape[:-1], v.shape[-1])
    row = torch.arange(q.shape[-2])[:, None]
    for start in range(0, k.shape[-2], 8):
        scores = wide @ k[..., start : start + 8, :].float().transpose(-1, -2)
        scores = scores.masked_fill(torch.arange(start, start + scores.shape[-1]) > row + shift, -1e30)
        above = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, shrunk = torch.exp(scores - above), torch.exp(largest - above)
        if not rescales:
            shrunk = torch.ones_like(shrunk)
        total = total * shrunk + weights.sum(-1, keepdim=True)
        output = output * shrunk + weights.to(q.dtype).float() @ v[..., start : start + 8, :].float()
        largest = above
    return (output / total).to(q.dtype)


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, rows, SIZE, generator=generator) for rows in (QUERIES, KEYS, KEYS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_attention_in_blocks_is_attention(dtype: torch.dtype) -> None:
    assert_within_rounding(in_blocks, *inputs(), reference=reference, dtype=dtype)


WRONG = {
    "a mask aligned at the top left (issue 581)": lambda q, k, v: in_blocks(q, k, v, shift=0),
    "a mask off by one": lambda q, k, v: in_blocks(q, k, v, shift=KEYS - QUERIES + 1),
    "blocks that are not rescaled": lambda q, k, v: in_blocks(q, k, v, rescales=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_found(mistake: str, dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError, match="beyond what rounding may do"):
        assert_within_rounding(WRONG[mistake], *inputs(), reference=reference, dtype=dtype, gradients=False)
