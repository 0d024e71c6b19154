"""Planted faults of the stage `shards`. No torch here."""

from __future__ import annotations

from consistency.extras.training.shards.spec import SHARDS
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.extras.training.planted"
_STAGES = (SHARDS,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="rank-with-other-seed", plant=f"{_PLANTED}:other_seed", expected="differs", stages=_STAGES,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="shard-stale", plant=f"{_PLANTED}:stale_part", expected="stale", stages=_STAGES,
        needs=(Need.RANKS, Need.LORA_B),
    ),
    Fault(
        name="shards-swapped", plant=f"{_PLANTED}:parts_swapped", expected="permuted", stages=_STAGES,
        needs=(Need.RANKS, Need.LORA_B),
    ),
)  # fmt: skip
