"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_OPERATIONS = "consistency.extras.operations"

PLUGIN = Plugin(
    name="operations",
    commands={
        "fleet": f"{_OPERATIONS}.fleet.command",
        "history": f"{_OPERATIONS}.history.command",
        "baseline": f"{_OPERATIONS}.history.command",
        "status": f"{_OPERATIONS}.status.command",
    },
    options=("load", "soak"),
    pasts=(f"{_OPERATIONS}.history.past:opened",),
    faults=(f"{_OPERATIONS}.soak.faults:ROWS",),
    formats=(f"{_OPERATIONS}.status.format:STATUS",),
    final_steps=(f"{_OPERATIONS}.soak.step:FINAL_STEP",),
)
