"""Planted faults of the stage `forward`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.stages.forward.planted"
_ROUTING = "consistency.stages.forward.planted_routing"
_STAGES = (standard.FORWARD,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="forward-off", plant=f"{_PLANTED}:results_off", expected="wrong-scale", stages=_STAGES,
        needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="forward-layer-zero", plant=f"{_PLANTED}:layer_zero", expected="differs", stages=_STAGES,
        needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="forward-fails", plant=f"{_PLANTED}:operator_fails", expected="missing", stages=_STAGES,
        needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="router-flipped", plant=f"{_ROUTING}:smallest", expected="decision-flipped", stages=_STAGES,
        base=f"python:{_ROUTING}:mixture", needs=(Need.ANOTHER_WORKER,),
    ),
)  # fmt: skip
