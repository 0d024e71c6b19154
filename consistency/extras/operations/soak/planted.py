"""Faults that come and go, so that a single run misses them and a soak finds them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Undo, instead

_EVERY = 20
"""Number of merges of a layer of which one is wrong."""


def one_bit_of_weight() -> Undo:
    """Flip one bit of one merged weight, in every 20th plain merge of that layer."""
    numbers = itertools.count(1)
    chosen_layer: list[Any] = []  # the first layer that is merged; empty before

    @instead("peft.tuners.lora.layer:Linear.merge")
    def merge(real: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
        real(layer, *args, **kwargs)
        chosen_layer[:] = chosen_layer or [layer]
        is_plain_merge = chosen_layer == [layer] and not kwargs.get("safe_merge")
        if is_plain_merge and next(numbers) % _EVERY == 0:
            with torch.no_grad():
                layer.get_base_layer().weight.view(torch.int32)[3, 5] ^= 1 << 27

    return merge()
