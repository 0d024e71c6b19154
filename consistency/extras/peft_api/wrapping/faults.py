"""The faults of wrappers. No torch here: what plants them is imported then."""

from __future__ import annotations

from consistency.extras.peft_api.wrapping.spec import WRAPPING
from consistency.worker.faults.fault import Fault

_PLANTED = "consistency.extras.peft_api.wrapping.planted"

HARMLESS_WRAPPER = f"python:{_PLANTED}:harmless"

ROWS = (
    Fault(
        name="wrapper-hides-model", plant=f"{_PLANTED}:hides_model", expected="hidden", stages=(WRAPPING,),
        case="C3", words="hides config", wrapper=HARMLESS_WRAPPER,
    ),
    Fault(
        name="wrapper-holds-twice", plant=f"{_PLANTED}:holds_twice", expected="held-twice", stages=(WRAPPING,),
        case="C3", wrapper=HARMLESS_WRAPPER,
    ),
)  # fmt: skip
