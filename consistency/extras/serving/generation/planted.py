"""Faults of generating text: in a cache, in the mask of a padded batch, in the choice of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, changing, instead

Keys = torch.Tensor


def _keys(change: Callable[[Any, Keys], Keys]) -> Install:
    """Return a fault that changes the keys which a cache gives back for one new token.

    A float64 pass keeps its keys. The fault is in the second layer that has keys: in a hybrid model other layers keep a
    state.
    """

    @instead("transformers.cache_utils:Cache.update")
    def update(
        real: Callable[..., tuple[Keys, Keys]],
        cache: Any,
        key: Keys,
        value: Keys,
        layer: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Keys, Keys]:
        keys, values = real(cache, key, value, layer, *args, **kwargs)
        layers_with_keys = [number for number, held in enumerate(cache.layers) if _has_keys(held)]
        is_step = key.shape[-2] == 1 and key.dtype != torch.float64
        if layer == layers_with_keys[:2][-1] and is_step:
            keys = change(cache, keys.clone())
        return keys, values

    return update


def _has_keys(cache_layer: Any) -> bool:
    return getattr(cache_layer, "keys", None) is not None


def _is_static(cache: Any) -> bool:
    return type(cache).__name__ == "StaticCache"


def _not_written(cache: Any, keys: Keys) -> Keys:
    if not _is_static(cache):  # a static cache has room for further tokens after the new one
        keys[..., -1, :] = keys[..., -2, :]
    return keys


def _stale(cache: Any, keys: Keys) -> Keys:
    if _is_static(cache):
        keys[..., 1, :] = keys[..., 0, :]
    return keys


last_key_not_written = _keys(_not_written)
rows_exchanged = _keys(lambda _, keys: keys.flip(0))
keys_in_float8 = _keys(lambda _, keys: keys.to(torch.float8_e4m3fn).to(keys.dtype))
stale_keys = _keys(_stale)


@instead("transformers.masking_utils:prepare_padding_mask")
def padding_is_seen(real: Callable[..., Any], mask: Any, *args: Any, **kwargs: Any) -> Any:
    """Let every token see the padding before it."""
    marks_padding = mask is not None and not mask.is_floating_point()
    return real(None if marks_padding else mask, *args, **kwargs)


@instead("transformers.generation.utils:GenerationMixin._prepare_position_ids_for_generation")
def positions_of_padding(real: Callable[..., Any], model: Any, inputs: Any, kwargs: dict[str, Any]) -> Any:
    """Count the padding before a text as if it were text."""
    mask = kwargs.get("attention_mask")
    if mask is not None:
        mask = torch.ones_like(mask)
    return real(model, inputs, {**kwargs, "attention_mask": mask})


@instead("peft.tuners.lora.layer:Linear.forward")
def off_in_steps(real: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Leave the adapter out where one token is computed at a time."""
    is_step = x.dim() == 3 and x.shape[1] == 1 and x.dtype != torch.float64
    if is_step:
        return layer.base_layer(x)
    return real(layer, x, *args, **kwargs)


@changing("consistency.extras.serving.generation.text:_written")
def another_token(written: torch.Tensor) -> None:
    """Choose one token that is not the most likely."""
    written[0, 2] += 1
