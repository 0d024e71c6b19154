"""A cache of keys and values in another dtype than the model has."""

from __future__ import annotations

from typing import Any

import torch


class KeptIn(torch.overrides.TorchFunctionMode):
    """Keep keys and values in another dtype while the mode is active."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, *keys_and_values = args
            args = (query, *(each.to(self._dtype).to(each.dtype) for each in keys_and_values))
        return func(*args, **(kwargs or {}))
