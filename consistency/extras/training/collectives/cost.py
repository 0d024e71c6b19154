"""The memory that the stage `collectives` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import MIB, Cost, Setting
from consistency.case.stage import Level


def collectives(s: Setting) -> Cost:
    """Send and add up tensors of up to 256 MiB at the level `thorough`, else of 4 MiB.

    Of the largest tensor there are at once a rank's contribution, its copy, and two results, or one and its exact
    values.
    """
    largest_bytes = 256 * MIB if s.case.level is Level.THOROUGH else 4 * MIB
    device_bytes = 4 * largest_bytes if s.on_device else 0
    return Cost(host_bytes=64 * MIB + 8 * largest_bytes, device_bytes=device_bytes)
