"""Planted faults of the stage `operators`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.worker.faults.fault import Fault

_PLANTED = "consistency.stages.operators.planted"
_STAGES = (standard.OPERATORS,)

ROWS: tuple[Fault, ...] = (
    Fault(name="operator-off", plant=f"{_PLANTED}:softmax_off", expected="wrong-scale", stages=_STAGES),
    Fault(name="operator-in-tf32", plant=f"{_PLANTED}:products_in_tf32", expected="tf32-products", stages=_STAGES),
    Fault(name="operator-fails", plant=f"{_PLANTED}:softmax_fails", expected="missing", stages=_STAGES),
)  # fmt: skip
