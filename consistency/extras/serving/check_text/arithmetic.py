"""How an engine may compute otherwise than in the model's dtype: its cache of keys and values in a narrower one.

That rounds every key and value once, by an error that depends on their last bits, so no pass of ours has the engine's
own errors: passes with noise get random ones of the same size, and what rounding may do is as much wider.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

INT8 = "int8"
_STEPS_OF_INT8 = 127
"""Steps of 8 bits between zero and the largest magnitude of a token's keys in one head."""

_RELATIVE = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
"""Largest relative error of one rounding to a dtype."""

OF_DEFAULT = ("float16",)
"""Dtypes of caches that engines have by default beside wider weights: what these explain is no fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArithmetic:
    """How a writer computes.

    Attributes
    ----------
    kv_dtype : str
        Dtype in which keys and values are kept; empty for the model's own.
    """

    kv_dtype: str = ""

    def with_noise(self, seed: int) -> RoundedCache | None:
        """Return a mode that adds this arithmetic's errors to a pass; None where it adds none."""
        return RoundedCache(self.kv_dtype, seed) if self.kv_dtype else None


OWN = EngineArithmetic()
"""The model's own dtype throughout."""


class RoundedCache(TorchFunctionMode):
    """Add errors of rounding to keys and values, while the mode is active, wherever attention is computed."""

    def __init__(self, dtype: str, seed: int) -> None:
        super().__init__()
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        if len(args) > 2:
            query, key, value, *others = args
            return func(query, self._rounded(key), self._rounded(value), *others, **kwargs)
        for name in ("key", "value"):
            kwargs[name] = self._rounded(kwargs[name])
        return func(*args, **kwargs)

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return values `(…, tokens, features)` with a random error of one rounding."""
        signs = torch.rand(values.shape, generator=self._generator, dtype=torch.float32) * 2 - 1
        widened = values.to(torch.float32)
        if self._dtype == INT8:
            steps = widened.abs().amax(-1, keepdim=True) / _STEPS_OF_INT8
            return (widened + signs * steps / 2).to(values.dtype)
        return (widened * (1 + _RELATIVE[self._dtype] * signs)).to(values.dtype)
