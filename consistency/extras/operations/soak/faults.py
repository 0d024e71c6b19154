"""Planted faults of a soak. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.extras.operations.soak.planted"
_STAGES = (standard.MERGED,)

ROWS: tuple[Fault, ...] = (
    # the case has one layer, so that twenty repeats take a part of the time
    Fault(
        name="merge-bit-flip-now-and-then",
        plant=f"{_PLANTED}:one_bit_of_weight",
        expected="not-repeatable",
        stages=_STAGES,
        words="single-bit flips",
        soak_s=3,
        one_layer=True,
        needs=(Need.LORA_LINEAR, Need.FLOATING_WEIGHT),
    ),
)
