"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_WRAPPING = "consistency.extras.peft_api.wrapping"

PLUGIN = Plugin(
    name="peft_api",
    faults=(f"{_WRAPPING}.faults:ROWS",),
    # these import torch when they are used
    api={"WrapperReport": f"{_WRAPPING}.report", "check_wrapped": f"{_WRAPPING}.check"},
)
