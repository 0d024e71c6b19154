"""Planted faults of the stage `replicas`. No torch here."""

from __future__ import annotations

from consistency.extras.training.replicas.spec import REPLICAS
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.extras.training.planted"
_STAGES = (REPLICAS,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="gradient-not-averaged", plant=f"{_PLANTED}:not_averaged", expected="unsynchronized", stages=_STAGES,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="gradient-averaged-twice", plant=f"{_PLANTED}:averaged_twice", expected="wrong-scale", stages=_STAGES,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="adapter-not-broadcast", plant=f"{_PLANTED}:not_broadcast", expected="differs", stages=_STAGES,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="training-rank-hangs", plant=f"{_PLANTED}:hangs", expected="lost-worker", stages=_STAGES,
        words="no sign of life", needs=(Need.RANKS,),
    ),
    Fault(
        name="training-rank-raises", plant=f"{_PLANTED}:raises", expected="failed-stage", stages=_STAGES,
        words="a kernel of this rank failed", needs=(Need.RANKS,),
    ),
)  # fmt: skip
