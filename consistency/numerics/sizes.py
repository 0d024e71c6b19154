"""Sizes of what is held at a time, which the estimates of memory take too. No torch here."""

from __future__ import annotations

PART_BYTES = 1 << 24
"""Of a weight that is widened to float64 at a time (`consistency.numerics.widening`)."""

PART_ELEMENTS = 1 << 20
"""Of a tensor in a file that are measured at once (`consistency.numerics.file_tensor`)."""

DIGEST_ROWS = 2048
"""Of 8 KiB that a device digests at once (`consistency.numerics.digest`)."""
