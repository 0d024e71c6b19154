"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_PEFT_API = "consistency.extras.peft_api"
_STAGES = ("adapters", "sharding", "wrapping")

PLUGIN = Plugin(
    name="peft_api",
    options=("adapters", "device_map", "wrapper"),
    stages=tuple(f"{_PEFT_API}.{stage}.spec:SPEC" for stage in _STAGES),
    faults=tuple(f"{_PEFT_API}.{stage}.faults:ROWS" for stage in _STAGES),
    # these import torch when they are used
    api={"WrapperReport": f"{_PEFT_API}.wrapping.report", "check_wrapped": f"{_PEFT_API}.wrapping.check"},
)
