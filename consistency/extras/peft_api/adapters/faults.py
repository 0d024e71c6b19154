"""Planted faults of the stage `adapters`. No torch here."""

from __future__ import annotations

from consistency.extras.peft_api.adapters.spec import ADAPTERS
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.extras.peft_api.adapters.planted"
_STAGES = (ADAPTERS,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="adapter-left-after-delete", plant=f"{_PLANTED}:left_after_delete", expected="left-behind", stages=_STAGES,
        words="delete_adapter leaves", several=True, shows_in=".deleted", needs=(Need.TUNED_LAYERS,),
    ),
    Fault(
        name="adapter-stays-active", plant=f"{_PLANTED}:stays_active", expected="inactive", stages=_STAGES,
        several=True, shows_in=".active adapters", needs=(Need.TUNED_LAYERS,),
    ),
    Fault(
        name="combination-wrong-weights", plant=f"{_PLANTED}:wrong_weights", expected="wrong-scale", stages=_STAGES,
        several=True, shows_in="linear.lora_", needs=(Need.LORA_LINEAR,),
    ),
    Fault(
        name="combination-wrong-density", plant=f"{_PLANTED}:wrong_density", expected="wrong-density", stages=_STAGES,
        several=True, shows_in=".density", needs=(Need.LORA_LINEAR,),
    ),
    Fault(
        name="combination-cut-short", plant=f"{_PLANTED}:cut_short", expected="differs", stages=_STAGES, several=True,
        shows_in="svd.", needs=(Need.LORA_LINEAR, Need.TRAINED),
    ),
    Fault(
        name="hotswap-leaves-one", plant=f"{_PLANTED}:leaves_one", expected="stale", stages=_STAGES, several=True,
        shows_in=".hotswap.", needs=(Need.LORA_B,),
    ),
    Fault(
        name="unmerge-off", plant=f"{_PLANTED}:unmerge_off", expected="drift", stages=_STAGES, several=True,
        shows_in=".drift", needs=(Need.LORA_LINEAR,),
    ),
)  # fmt: skip
