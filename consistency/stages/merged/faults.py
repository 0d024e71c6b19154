"""Planted faults of the stage `merged`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.stages.merged.planted"
_STAGES = (standard.MERGED,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="merge-bit-flip", plant=f"{_PLANTED}:one_bit_of_weight", expected="bit-flip", stages=_STAGES,
        without_form="differs", needs=(Need.TUNED_LAYERS, Need.FLOAT32_WEIGHT, Need.FLOATING_WEIGHT),
    ),
    Fault(
        name="merge-in-tf32", plant=f"{_PLANTED}:products_in_tf32", expected="tf32-products", stages=_STAGES,
        without_form="differs", needs=(Need.LORA_LINEAR, Need.FLOAT32_ADAPTER),
    ),
    Fault(
        name="merge-zeros", plant=f"{_PLANTED}:zero_delta", expected="zeros", stages=_STAGES, without_form="differs",
        needs=(Need.TUNED_LAYERS,),
    ),
    Fault(
        name="merge-off", plant=f"{_PLANTED}:delta_off", expected="wrong-scale", stages=_STAGES, without_form="differs",
        needs=(Need.TUNED_LAYERS, Need.LORA_LINEAR_OR_FLOAT32),
    ),
    Fault(
        name="merge-fails", plant=f"{_PLANTED}:kernel_fails", expected="missing", stages=_STAGES,
        needs=(Need.TUNED_LAYERS, Need.ANOTHER_WORKER),
    ),
    Fault(
        name="merge-not-repeatable", plant=f"{_PLANTED}:flaky_delta", expected="not-repeatable", stages=_STAGES,
        repeat=2, without_form="differs",
        needs=(Need.TUNED_LAYERS, Need.LORA_LINEAR_OR_FLOAT32),
    ),
)  # fmt: skip
