"""Planted faults of the stage `gradient`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.stages.gradient.planted"
_STAGES = (standard.GRADIENT,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="gradient-off", plant=f"{_PLANTED}:gradients_off", expected="wrong-scale", stages=_STAGES,
        needs=(Need.EXACT_KERNELS, Need.ANOTHER_WORKER),
    ),
    Fault(
        name="gradient-zeros", plant=f"{_PLANTED}:one_layer_lost", expected="zeros", stages=_STAGES,
        needs=(Need.TRAINED, Need.ANOTHER_WORKER),
    ),
    Fault(
        name="optimizer-off", plant=f"{_PLANTED}:step_off", expected="wrong-scale", stages=_STAGES,
    ),
)  # fmt: skip
