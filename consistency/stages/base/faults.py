"""Planted faults of the stage `base`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.stages.base.planted"
_STAGES = (standard.BASE,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="base-bit-flip", plant=f"{_PLANTED}:one_bit", expected="bit-flip", stages=_STAGES,
        needs=(Need.WEIGHT_FILE,),
    ),
    Fault(
        name="base-through-bfloat16", plant=f"{_PLANTED}:through_bfloat16", expected="rounded-to-bf16", stages=_STAGES,
        needs=(Need.WEIGHT_FILE, Need.FLOAT32_FILE, Need.FLOAT32_MODEL),
    ),
    Fault(
        name="quantized-bit-flip", plant=f"{_PLANTED}:one_bit_of_a_code", expected="bit-flip", stages=_STAGES,
        needs=(Need.WEIGHT_FILE, Need.QUANTIZED),
    ),
    Fault(
        name="quantized-scales-dropped", plant=f"{_PLANTED}:scales_dropped", expected="zeros", stages=_STAGES,
        needs=(Need.WEIGHT_FILE, Need.QUANTIZED),
    ),
    Fault(
        name="offload-bit-flip", plant=f"{_PLANTED}:one_bit_on_arrival", expected="bit-flip", stages=_STAGES,
        offloads=True, needs=(Need.WEIGHT_FILE,),
    ),
)  # fmt: skip
