"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_SOAK = "consistency.extras.operations.soak"

PLUGIN = Plugin(name="operations", faults=(f"{_SOAK}.faults:ROWS",), after_stages=(f"{_SOAK}.soaking:soak",))
