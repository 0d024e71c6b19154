"""The memory that the stage `memory` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import Cost, Setting


def memory(s: Setting) -> Cost:
    """Return the memory for merging one adapted layer at a time, ten times, under torch's profiler."""
    layer_bytes = s.shape.largest_layer_elements * (2 * 4 + s.shape.width)
    host_bytes = 0 if s.on_device else layer_bytes
    return Cost(host_bytes=host_bytes, device_bytes=layer_bytes)
