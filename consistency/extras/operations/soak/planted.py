"""Faults that come and go, so that one run does not meet them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Undo, instead

_EVERY = 20


def one_bit_of_weight() -> Undo:
    """Flip one bit of one merged weight, in every 20th plain merge of that layer."""
    merges = itertools.count(1)
    chosen: list[Any] = []

    @instead("peft.tuners.lora.layer:Linear.merge")
    def merge(real: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
        real(layer, *args, **kwargs)
        chosen[:] = chosen or [layer]
        if chosen == [layer] and not kwargs.get("safe_merge") and next(merges) % _EVERY == 0:
            with torch.no_grad():
                layer.get_base_layer().weight.view(torch.int32)[3, 5] ^= 1 << 27

    return merge()
