"""Sizes of the parts of a tensor that are held at a time; the estimates of memory read them here too. No torch here."""

from __future__ import annotations

PART_BYTES = 1 << 24
"""Size of the buffer in which a weight is widened to float64.

Measured on one core, float64 products of 32 rows with a weight of 5632 x 2048 in bfloat16: from 8 MiB on no slower than
with larger ones; with 2 MiB a product with its transpose takes twice as long.
"""

PART = 1 << 20
"""Elements of a part of a tensor in a file, 8 MiB of float64. Reading takes about 1 ms then, and opening a file 0.1
ms."""

GPU_CHUNK_ROWS = 2048
"""Rows that a device digests at once, of 16 MiB together. Three such arrays are alive: the kernels outlast their
launches (some 5 µs at 3 TB/s), and a device that holds little besides one layer has room for them."""
