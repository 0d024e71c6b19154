"""Kinds of findings about a training that goes on. No torch here."""

from __future__ import annotations

from consistency.comparison import kinds

RANKS_DIFFER = kinds.declare("ranks-differ")
OTHER_RANK_DIFFERS = kinds.declare("other-rank-differs")
WRONG_BLOCK = kinds.declare("wrong-block")
WRONG_SUM = kinds.declare("wrong-sum")
NOT_FINITE_FROM = kinds.declare("not-finite-from")
SAME_BATCH = kinds.declare("same-batch")
UNEQUAL_WEIGHTS = kinds.declare("unequal-weights")
NOT_RELOADED = kinds.declare("not-reloaded")
NOT_TRAINED = kinds.declare("not-trained")
BASE_CHANGED = kinds.declare("base-changed")
CARD_COUNTER = kinds.declare("card-counter")
STANDS_STILL = kinds.declare("stands-still")
LOSS_LEAVES = kinds.declare("loss-leaves")

KINDS = (
    RANKS_DIFFER,
    OTHER_RANK_DIFFERS,
    WRONG_BLOCK,
    WRONG_SUM,
    NOT_FINITE_FROM,
    SAME_BATCH,
    UNEQUAL_WEIGHTS,
    NOT_RELOADED,
    NOT_TRAINED,
    BASE_CHANGED,
    CARD_COUNTER,
    STANDS_STILL,
    LOSS_LEAVES,
)
