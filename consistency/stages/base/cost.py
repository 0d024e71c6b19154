"""The memory that the stage `base` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import DIGEST_BYTES, WINDOW_BYTES, Cost, Setting


def base(s: Setting) -> Cost:
    """Return the memory for digesting every tensor in place, and its bytes in the file.

    These are mapped already, or in the page cache.
    """
    largest = s.shape.largest_elements * s.shape.width
    # a tensor that is cast on loading is cast once more, on the host, to be compared
    host_bytes = largest if s.shape.converted_bytes else 0
    return Cost(
        host_bytes=host_bytes,
        device_bytes=DIGEST_BYTES,
        window_bytes=min(s.shape.mapped_bytes, WINDOW_BYTES + largest),
    )
