"""Planted faults of the stage `tensor-parallel`. No torch here."""

from __future__ import annotations

from consistency.extras.training.tensor_parallel.spec import TENSOR_PARALLEL
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.extras.training.planted"
_STAGES = (TENSOR_PARALLEL,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="split-part-of-another", plant=f"{_PLANTED}:part_of_another", expected="swapped", stages=_STAGES,
        needs=(Need.RANKS, Need.SPLIT, Need.LORA_B),
    ),
    Fault(
        name="split-scaled-by-ranks", plant=f"{_PLANTED}:scaled_by_ranks", expected="settings", stages=_STAGES,
        needs=(Need.RANKS, Need.LORA_B),
    ),
)  # fmt: skip
