"""Planted faults of the stage `memory`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.stages.memory.planted"
_STAGES = (standard.MEMORY,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="placed-elsewhere", plant=f"{_PLANTED}:one_elsewhere", expected="wrong-device", stages=_STAGES, case="C2",
        needs=(Need.ADAPTER,),
    ),
    Fault(
        name="bytes-elsewhere", plant=f"{_PLANTED}:stray_bytes", expected="touched", stages=_STAGES, case="C2",
        words="stay there", two_devices=True,
    ),
    Fault(
        name="merge-third-copy", plant=f"{_PLANTED}:third_copy", expected="third-copy", stages=_STAGES, case="C5",
        shows_in="merge_peak", needs=(Need.LORA_LINEAR,),
    ),
)  # fmt: skip
