r"""Attention as fused kernels compute it, for passes that show what rounding may do.

A kernel for attention never has all its weights: it goes through the keys in blocks, with the largest score so far
(Dao et al., "FlashAttention", 2022; Rabe and Staats, arXiv 2112.05682). It rounds where the formula does not: in a
half type the weights of a block before they multiply the values, and in the backward pass

.. math:: dS = P \circ (dP - D), \quad D = \sum dO \circ O

with the output O as it was rounded, where the formula has a sum over the keys. Where a token attends to one key alone,
as the first one always does and in a trained model most others nearly do, dS is zero but for what O is off by, and
many times what noise on the steps of the formula shows. Every fused kernel rounds so, the CPU's own too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from consistency.numerics.rounding_noise import RoundingNoise

BLOCK = 64
"""Keys that are taken at once: kernels take 32 to 256, by head size and device."""


class FusedAttention(TorchFunctionMode):
    """Compute `scaled_dot_product_attention` in blocks of keys while the mode is active."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention and len(args) < 5 and not kwargs.get("dropout_p"):
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            if mask is None or not mask.requires_grad:
                return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 - none: the model is in evaluation
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Take the arguments of torch's function."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    bias: torch.Tensor | None = None
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        bias = attn_mask.to(torch.float32)
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(bias).masked_fill(~attn_mask, -math.inf)
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    found: torch.Tensor = _Blocks.apply(query, key, value, bias, factor)  # type: ignore[no-untyped-call]
    return found


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        wide = query.to(torch.float32)
        shape = (*query.shape[:-1], 1)
        largest = torch.full(shape, torch.finfo(torch.float32).min, device=query.device)
        total, output = torch.zeros(shape, device=query.device), wide.new_zeros((*query.shape[:-1], value.shape[-1]))
        noise: dict[int, list[int]] = {start: [] for start in range(0, key.shape[-2], BLOCK)}
        for start in noise:
            scores = _scores(wide, key[..., start : start + BLOCK, :], bias, scale, start, noise[start])
            above = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, shrunk = torch.exp(scores - above), torch.exp(largest - above)
            total = total * shrunk + weights.sum(-1, keepdim=True)
            part = weights.to(query.dtype).to(torch.float32) @ value[..., start : start + BLOCK, :].to(torch.float32)
            output, largest = output * shrunk + part, above
        output = (output / total.clamp_min(torch.finfo(torch.float32).tiny)).to(query.dtype)
        ctx.save_for_backward(query, key, value, output, largest + torch.log(total), bias)
        ctx.scale, ctx.noise = scale, noise
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, output, normalizer, bias = ctx.saved_tensors
        dtype, wide, up = query.dtype, query.to(torch.float32), gradient.to(torch.float32)
        difference = (up * output.to(torch.float32)).sum(-1, keepdim=True)
        of_query = torch.zeros_like(wide)
        of_key, of_value = [], []
        for start, noise in ctx.noise.items():
            keys, values = (t[..., start : start + BLOCK, :].to(torch.float32) for t in (key, value))
            weights = torch.exp(_scores(wide, keys, bias, ctx.scale, start, noise) - normalizer)
            of_value.append(weights.to(dtype).to(torch.float32).transpose(-1, -2) @ up)
            of_scores = (weights * (up @ values.transpose(-1, -2) - difference)).to(dtype).to(torch.float32)
            of_query = of_query + of_scores @ keys * ctx.scale
            of_key.append(of_scores.transpose(-1, -2) @ wide * ctx.scale)
        return of_query.to(dtype), torch.cat(of_key, -2).to(dtype), torch.cat(of_value, -2).to(dtype), None, None


def _scores(
    query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None, scale: float, start: int, noise: list[int]
) -> torch.Tensor:
    """Return the scores of a block; the backward pass computes them again, with the same rounding errors."""
    with RoundingNoise.repeating(noise):
        scores = query @ key.to(torch.float32).transpose(-1, -2) * scale
        return scores if bias is None else scores + bias[..., start : start + BLOCK]
