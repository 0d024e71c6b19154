"""The memory that the stage `merged` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import WINDOW_BYTES, Cost, Setting


def merged(s: Setting) -> Cost:
    """Return the memory for the delta, merged and safely merged weight of a layer, and its low-rank product in float64.

    One layer at a time is merged, so the largest counts. Its weight exists four times in its dtype (before, merged,
    safely merged, the file's) and its delta twice in float32, the adapter's dtype.
    """
    layer_bytes = s.shape.largest_layer_elements * (4 * s.shape.width + 2 * 4)
    return Cost(
        host_bytes=layer_bytes,
        device_bytes=layer_bytes,
        window_bytes=min(s.shape.mapped_bytes, WINDOW_BYTES + s.shape.largest_layer_elements * s.shape.width),
    )
