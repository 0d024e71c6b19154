"""How the tokens of a text were drawn."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that an engine draws tokens with; each default leaves the model's probabilities as they are.

    Attributes
    ----------
    temperature : float
        What the logits are divided by; 0 takes the most likely token.
    top_k : int
        Tokens that are left, the most likely ones; 0 leaves all.
    top_p : float
        Sum of probabilities that the most likely tokens must reach to be all that is left.
    min_p : float
        Least probability of a token that is left, in units of the largest one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
