"""The memory that the stage `collectives` takes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import MIB, Cost, Setting
from consistency.case.stage import Level


def collectives(s: Setting) -> Cost:
    """Send and add up tensors of up to 256 MiB at the level `thorough`, else of 4 MiB.

    Of the largest there are at once what a rank gives, its copy, and two results, or one and its exact values.
    """
    largest = 256 * MIB if s.case.level is Level.THOROUGH else 4 * MIB
    return Cost(host_bytes=64 * MIB + 8 * largest, device_bytes=4 * largest if s.on_device else 0)
