"""Planted faults of the stage `sharding`. No torch here."""

from __future__ import annotations

from consistency.extras.peft_api.sharding.spec import SHARDING
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.extras.peft_api.sharding.planted"
_STAGES = (SHARDING,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="labels-changed-on-hop", plant=f"{_PLANTED}:old_bytes", expected="labels-changed", stages=_STAGES,
        case="C4", words="labels changed during transfer to device", shows_in=".on the way",
        needs=(Need.TOKENS,),
    ),
    Fault(
        name="ids-past-vocabulary", plant=f"{_PLANTED}:an_added_token", expected="ids-past-vocabulary",
        stages=_STAGES, case="C4", words="ids past the vocabulary: largest id",
        needs=(Need.TOKENS,),
    ),
)  # fmt: skip
