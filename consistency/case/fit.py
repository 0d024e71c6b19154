"""How much of a case is computed at a time, and how much of it at all, where memory is short."""

from __future__ import annotations

import msgspec


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a case is cut to so that it fits; None leaves the choice to the level and to the stage.

    Attributes
    ----------
    sequences, tokens : int or None
        Inputs that are made: fewer than those of the level. The rest is not checked.
    """

    sequences: int | None = None
    tokens: int | None = None
