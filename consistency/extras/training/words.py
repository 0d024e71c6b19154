"""Words of a model that several devices train or hold together. No torch here."""

from __future__ import annotations

from consistency.numerics.words import declare

UNSYNCHRONIZED = declare(
    "unsynchronized",
    phrase="an adapter that each rank trains alone",
    computed="the rank's own gradient in place of the average",
)
