"""The memory that the stage `adapter` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import Cost, Setting


def adapter(s: Setting) -> Cost:
    """Return the memory for loading the adapter once more over poison, and once by each further load path."""
    return Cost(host_bytes=3 * s.shape.adapter_bytes, device_bytes=2 * s.shape.adapter_bytes)
