"""Faults by shape: kernels that are right for short texts, and wrong for more rows, for long keys, in one window.

Libraries choose kernels by shape, so a wrong one may run at one shape alone. Each fault acts below the model, in the
products and in the attention that torch computes; passes in float64 keep theirs. The bases have what the faults are in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, instead

Product = Callable[..., torch.Tensor]
Attention = Callable[..., torch.Tensor]

_product = instead("torch.nn.functional:linear")
_attention = instead("torch.nn.functional:scaled_dot_product_attention")


def model_with(*, head_size: int, window: int | None = None) -> torch.nn.Module:
    """Return a small model with weights that are the same on every machine."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=128,
        hidden_size=2 * head_size,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_size,
        max_position_embeddings=8192,
        sliding_window=window,
    )
    model: torch.nn.Module = MistralForCausalLM(config).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:  # norms keep their ones; sines, because torch.randn depends on the kernels in use
                angles = torch.arange(parameter.numel(), dtype=torch.float64) * (number + 7.3)
                parameter.copy_((angles.sin() * parameter.shape[-1] ** -0.5).reshape(parameter.shape))
    return model


def heads_of_64() -> torch.nn.Module:
    return model_with(head_size=64)


def heads_of_128() -> torch.nn.Module:
    return model_with(head_size=128)


def window_of_16() -> torch.nn.Module:
    return model_with(head_size=64, window=16)


def window_of_128() -> torch.nn.Module:
    return model_with(head_size=64, window=128)


def window_of_1024() -> torch.nn.Module:
    return model_with(head_size=64, window=1024)


def _without_product(first: Callable[[int], int]) -> Install:
    """Return a fault that leaves rows without the product, from the one on that `first` names for a number of rows."""

    @_product
    def linear(real: Product, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        result = real(x, weight, bias)
        count = x.shape[:-1].numel()
        if x.dtype == torch.float64 or first(count) >= count:
            return result
        rows = result.clone().reshape(count, -1)
        rows[first(count) :] = 0 if bias is None else bias
        return rows.reshape(result.shape)

    return linear


beyond_64_rows = _without_product(lambda count: 64)  # noqa: ARG005 - the same for any number
beyond_128_rows = _without_product(lambda count: 128)  # noqa: ARG005
beyond_512_rows = _without_product(lambda count: 512)  # noqa: ARG005
last_tile = _without_product(lambda count: count - count % 64 if count > 64 else count)


def _attention_off(is_wrong: Callable[[torch.Tensor, torch.Tensor], bool]) -> Install:
    """Return a fault of attention in some shapes: two percent too large."""

    @_attention
    def attend(
        real: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        result = real(query, key, value, *args, **kwargs)
        if query.dtype != torch.float64 and is_wrong(query, key):
            result = result * 1.02
        return result

    return attend


one_query = _attention_off(lambda query, key: query.shape[-2] == 1)  # noqa: ARG005
head_of_64 = _attention_off(lambda query, key: query.shape[-1] == 64)  # noqa: ARG005
head_of_128 = _attention_off(lambda query, key: query.shape[-1] == 128)  # noqa: ARG005
long_keys = _attention_off(lambda query, key: key.shape[-2] > 256)  # noqa: ARG005
batch_of_1 = _attention_off(lambda query, key: query.shape[0] == 1)  # noqa: ARG005
batch_of_9 = _attention_off(lambda query, key: query.shape[0] == 9)  # noqa: ARG005


def _one_key_too_many() -> Install:
    """Return a fault that lets a sliding window read one key more, the one before its first."""

    @_attention
    def attend(
        real: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_mask is not None and attn_mask.dtype == torch.bool and query.dtype != torch.float64:
            before_first = attn_mask[..., 1:] & ~attn_mask[..., :-1]
            attn_mask = attn_mask.clone()
            attn_mask[..., :-1] |= before_first
        return real(query, key, value, attn_mask, *args, **kwargs)

    return attend


wide_window_of_16 = _one_key_too_many()
wide_window_of_128 = _one_key_too_many()
wide_window_of_1024 = _one_key_too_many()
