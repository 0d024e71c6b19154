"""Kinds of findings of a saved adapter. No torch here."""

from __future__ import annotations

from consistency.comparison import kinds

SCALING = kinds.declare("scaling")
COMPUTED_ON_LOADING = kinds.declare("computed-on-loading")
OTHER_TRAINING = kinds.declare("other-training")

KINDS = (SCALING, COMPUTED_ON_LOADING, OTHER_TRAINING)
