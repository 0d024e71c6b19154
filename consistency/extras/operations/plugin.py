"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_HISTORY = "consistency.extras.operations.history"
_SOAK = "consistency.extras.operations.soak"

PLUGIN = Plugin(
    name="operations",
    commands=dict.fromkeys(("history", "baseline"), f"{_HISTORY}.command"),
    options=("load", "soak"),
    pasts=(f"{_HISTORY}.past:opened",),
    faults=(f"{_SOAK}.faults:ROWS",),
    final_steps=(f"{_SOAK}.step:FINAL_STEP",),
)
