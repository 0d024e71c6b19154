"""Planted faults of the stage `trajectory`. No torch here."""

from __future__ import annotations

from consistency.extras.training.trajectory.spec import TRAJECTORY
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.extras.training.trajectory.planted"
_STAGES = (TRAJECTORY,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="trajectory-gradient-scaled", plant=f"{_PLANTED}:gradient_scaled", expected="left-trajectory",
        stages=_STAGES, steps=6, words="at step 5, in the gradient of lora_B",
        needs=(Need.LORA_B,),
    ),
    Fault(
        name="trajectory-forward-off", plant=f"{_PLANTED}:forward_off", expected="left-trajectory", stages=_STAGES,
        steps=6, words="at step 4, in the gradient of ",
    ),
    Fault(
        name="trajectory-optimizer-off", plant=f"{_PLANTED}:optimizer_off", expected="left-trajectory",
        stages=_STAGES, steps=6, words="after the optimizer's step",
    ),
)  # fmt: skip
