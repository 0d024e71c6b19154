"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_WRAPPING = "consistency.extras.peft_api.wrapping"

PLUGIN = Plugin(
    name="peft_api",
    stages=(
        "consistency.extras.peft_api.adapters.spec:SPEC",
        "consistency.extras.peft_api.sharding.spec:SPEC",
        "consistency.extras.peft_api.wrapping.spec:SPEC",
    ),
    faults=(f"{_WRAPPING}.faults:ROWS",),
    # these import torch when they are used
    api={"WrapperReport": f"{_WRAPPING}.report", "check_wrapped": f"{_WRAPPING}.check"},
)
