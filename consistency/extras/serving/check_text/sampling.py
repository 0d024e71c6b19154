"""How texts were written, as it can be stated: the sampler, and the dtype of the cache. No torch here."""

from __future__ import annotations

import msgspec

KV_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
"""Dtypes that engines keep keys and values in, those with the smaller errors first."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn from logits; the defaults change nothing.

    Attributes
    ----------
    temperature : float
        Logits are divided by it.
    top_k : int
        Only as many of the most likely tokens are left; 0 leaves all.
    top_p : float
        Only the most likely tokens are left that have this probability together.
    min_p : float
        Only tokens are left that have this share of the most likely one's probability.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def leaves_out(self) -> bool:
        """Report whether it leaves some tokens out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def __str__(self) -> str:
        """Return the settings that differ from the defaults: `temperature 0.7 and top-p 0.9`; empty where none does."""
        named = []
        if self.temperature != 1.0:
            named.append(f"temperature {self.temperature:g}")
        if self.top_k:
            named.append(f"top-k {self.top_k}")
        if self.top_p != 1.0:
            named.append(f"top-p {self.top_p:g}")
        if self.min_p:
            named.append(f"min-p {self.min_p:g}")
        return " and ".join(named)
