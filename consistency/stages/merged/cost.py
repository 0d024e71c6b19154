"""The memory that the stage `merged` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import WINDOW_BYTES, Cost, Setting


def merged(s: Setting) -> Cost:
    """Make delta, merged and safely merged weight of each adapted layer, and their low-rank product in float64.

    A layer's weight exists four times in its dtype (before, merged, safely merged, the file's) and its delta twice in
    float32, the adapter's dtype.
    """
    of_layer = s.shape.largest_layer_elements * (4 * s.shape.width + 2 * 4)
    return Cost(
        host_bytes=of_layer,
        device_bytes=of_layer,
        window_bytes=min(s.shape.mapped_bytes, WINDOW_BYTES + s.shape.largest_layer_elements * s.shape.width),
    )
