"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_SOAK = "consistency.extras.operations.soak"

PLUGIN = Plugin(
    name="operations",
    options=("load", "soak"),
    faults=(f"{_SOAK}.faults:ROWS",),
    final_steps=(f"{_SOAK}.step:FINAL_STEP",),
)
