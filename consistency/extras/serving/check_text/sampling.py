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
    repetition_penalty : float
        Logits of tokens that prompt or text have had are divided by it where they are positive, else multiplied.
    presence_penalty, frequency_penalty : float
        Subtracted from the logit of a token that the text has had: once, and as often as it was there.
    penalty_last_n : int
        Tokens, of prompt and text together, that all three penalties look back to; 0 for the whole text, and for the
        repetition penalty the whole prompt.
    penalized_padding : bool
        The repetition penalty takes the first token that ends a text for one that was there, as where a batch of
        unequal prompts is filled up with it: transformers before 5.23 does.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 0
    penalized_padding: bool = False

    @property
    def leaves_out(self) -> bool:
        """Report whether it leaves some tokens out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalizes(self) -> bool:
        """Report whether it changes the logits of tokens that were there before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def penalties(self) -> Sampling:
        """Return its penalties alone."""
        if not self.penalizes:
            return NO_PENALTIES
        return Sampling(
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            penalty_last_n=self.penalty_last_n,
            penalized_padding=self.penalized_padding,
        )

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
        if self.repetition_penalty != 1.0:
            padding = ", which padding had too" if self.penalized_padding else ""
            named.append(f"repetition penalty {self.repetition_penalty:g}{padding}")
        if self.presence_penalty:
            named.append(f"presence penalty {self.presence_penalty:g}")
        if self.frequency_penalty:
            named.append(f"frequency penalty {self.frequency_penalty:g}")
        if self.penalizes and self.penalty_last_n:
            named[-1] += f" over the last {self.penalty_last_n} tokens"
        return " and ".join(named)


NO_PENALTIES = Sampling()
"""A sampler without penalties."""


_USUAL_TOP_K = (1000, 500, 200, 100, 64, 50, 40, 30, 20, 10, 5)
_USUAL_TOP_P = (0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
USUAL_SAMPLERS = (
    *(Sampling(top_p=top_p) for top_p in _USUAL_TOP_P),
    *(Sampling(top_k=top_k) for top_k in _USUAL_TOP_K),
    *(Sampling(top_k=top_k, top_p=top_p) for top_k in (20, 40, 50, 64) for top_p in (0.95, 0.9, 0.8)),
    *(Sampling(min_p=min_p) for min_p in (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)),
)
"""Samplers that are tried where rounding at each token is too large to tell the parameter."""

USUAL_TEMPERATURES = (1.0, 0.7, 0.6, 0.8, 0.9, 0.5, 1.2, 0.3, 0.2, 0.4, 0.1, 0.75, 0.95, 1.1, 1.5)
"""Temperatures that are tried together with tokens left out: there the temperature cannot be fitted by itself."""
