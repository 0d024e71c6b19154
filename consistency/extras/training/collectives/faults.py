"""Planted faults of the stage `collectives`. No torch here."""

from __future__ import annotations

from consistency.extras.training.collectives.spec import COLLECTIVES
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.extras.training.collectives.planted"
_STAGES = (COLLECTIVES,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="sum-last-elements", plant=f"{_PLANTED}:last_elements", expected="block", stages=_STAGES,
        needs=(Need.RANKS,),
    ),
    Fault(  # as if a copy between devices were wrong: a bisection has to name the setting that turns them off
        name="sum-wrong-with-p2p", plant=f"{_PLANTED}:with_p2p", expected="block", stages=_STAGES,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="sum-not-added", plant=f"{_PLANTED}:own_numbers", expected="differs", stages=_STAGES,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="sum-one-bit", plant=f"{_PLANTED}:one_bit", expected="differs", stages=_STAGES,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="sum-other-order-again", plant=f"{_PLANTED}:other_order_again", expected="not-repeatable",
        stages=_STAGES, words="the order is not fixed", is_note=True,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="sum-wrong-again", plant=f"{_PLANTED}:wrong_again", expected="differs", stages=_STAGES,
        words="a second run", needs=(Need.RANKS,),
    ),
    Fault(
        name="sum-wrong-in-pairs", plant=f"{_PLANTED}:wrong_in_pairs", expected="differs", stages=_STAGES,
        shows_in="+", needs=(Need.RANKS, Need.THREE_RANKS),
    ),
    Fault(
        name="parts-swapped", plant=f"{_PLANTED}:swapped", expected="permuted", stages=_STAGES,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="rank-killed", plant=f"{_PLANTED}:killed", expected="lost-worker", stages=_STAGES, words="SIGKILL",
        needs=(Need.RANKS,),
    ),
    Fault(
        name="rank-hangs", plant=f"{_PLANTED}:hangs", expected="lost-worker", stages=_STAGES,
        words="no sign of life",
        needs=(Need.RANKS,),
    ),
    Fault(
        name="rank-frozen", plant=f"{_PLANTED}:frozen", expected="lost-worker", stages=_STAGES,
        words="no sign of life",
        needs=(Need.RANKS,),
    ),
    Fault(
        name="rank-raises", plant=f"{_PLANTED}:raises", expected="failed-stage", stages=_STAGES, words="planted",
        needs=(Need.RANKS,),
    ),
)  # fmt: skip
