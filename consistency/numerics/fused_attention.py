r"""Attention as fused kernels compute it, in blocks of keys, for passes that show what rounding may do.

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
        has_dropout = len(args) > 4 or kwargs.get("dropout_p")
        if func is functional.scaled_dot_product_attention and not has_dropout:
            positional_mask = args[3] if len(args) > 3 else None
            mask = kwargs.get("attn_mask", positional_mask)
            if mask is None or not mask.requires_grad:  # `_Blocks` has no gradient of a mask
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
    """Compute attention in blocks of keys; the parameters are those of `scaled_dot_product_attention`."""
    if enable_gqa:
        key, value = (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
    bias: torch.Tensor | None = None
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        bias = attn_mask.to(torch.float32)
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(bias).masked_fill(~attn_mask, -math.inf)
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    output: torch.Tensor = _Blocks.apply(query, key, value, bias, factor)  # type: ignore[no-untyped-call]
    return output


class _Blocks(torch.autograd.Function):
    """Attention in blocks of keys, forward and backward, in float32 with the roundings of a fused kernel.

    Shapes are `(..., tokens, features)` for query, key and value, `(..., tokens, 1)` for what each query has one of.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """Return the output, in the dtype of the query."""
        query32 = query.to(torch.float32)
        shape = (*query.shape[:-1], 1)
        # the smallest number and not minus infinity: where a block is masked as a whole, inf - inf would be NaN
        largest = torch.full(shape, torch.finfo(torch.float32).min, device=query.device)
        total, output = torch.zeros(shape, device=query.device), query32.new_zeros((*query.shape[:-1], value.shape[-1]))
        noise: dict[int, list[int]] = {start: [] for start in range(0, key.shape[-2], BLOCK)}
        for start in noise:
            scores = _scores(query32, key[..., start : start + BLOCK, :], bias, scale, start, noise[start])
            new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
            # sums so far are relative to the largest score so far: they shrink where a block has a larger one
            weights, shrunk = torch.exp(scores - new_largest), torch.exp(largest - new_largest)
            total = total * shrunk + weights.sum(-1, keepdim=True)
            # a kernel stores the weights in the half type before it multiplies the values
            part = weights.to(query.dtype).to(torch.float32) @ value[..., start : start + BLOCK, :].to(torch.float32)
            output, largest = output * shrunk + part, new_largest
        output = (output / total.clamp_min(torch.finfo(torch.float32).tiny)).to(query.dtype)
        ctx.save_for_backward(query, key, value, output, largest + torch.log(total), bias)
        ctx.scale, ctx.noise = scale, noise
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of query, key and value, from the output as it was rounded; None for bias and scale."""
        query, key, value, output, normalizer, bias = ctx.saved_tensors
        dtype, query32, gradient32 = query.dtype, query.to(torch.float32), gradient.to(torch.float32)
        # D of the formula above
        difference = (gradient32 * output.to(torch.float32)).sum(-1, keepdim=True)
        query_gradient = torch.zeros_like(query32)
        key_gradients, value_gradients = [], []
        for start, noise in ctx.noise.items():
            keys, values = (tensor[..., start : start + BLOCK, :].to(torch.float32) for tensor in (key, value))
            weights = torch.exp(_scores(query32, keys, bias, ctx.scale, start, noise) - normalizer)
            value_gradients.append(weights.to(dtype).to(torch.float32).transpose(-1, -2) @ gradient32)
            # dS of the formula above, stored in the half type before it is multiplied
            score_gradient = (
                (weights * (gradient32 @ values.transpose(-1, -2) - difference)).to(dtype).to(torch.float32)
            )
            query_gradient = query_gradient + score_gradient @ keys * ctx.scale
            key_gradients.append(score_gradient.transpose(-1, -2) @ query32 * ctx.scale)
        # in this order, for noise is drawn by the number of the operation
        query_gradient = query_gradient.to(dtype)
        key_gradient = torch.cat(key_gradients, -2).to(dtype)
        value_gradient = torch.cat(value_gradients, -2).to(dtype)
        return query_gradient, key_gradient, value_gradient, None, None


def _scores(
    query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None, scale: float, start: int, noise: list[int]
) -> torch.Tensor:
    """Return the scores of a block; the backward pass computes them again, with the same rounding errors.

    Parameters
    ----------
    query, key : torch.Tensor
        All queries in float32, and the keys of the block.
    bias : torch.Tensor or None
        What is added to the scores of all keys, float32.
    start : int
        Number of the block's first key.
    noise : list of int
        Where the noise of the block begins, see `RoundingNoise.repeating`.
    """
    with RoundingNoise.repeating(noise):
        scores = query @ key.to(torch.float32).transpose(-1, -2) * scale
        return scores if bias is None else scores + bias[..., start : start + BLOCK]
