"""The number of passes that the stage `trajectory` computes. No torch here."""

from __future__ import annotations

from consistency.case.budget.costs import Setting
from consistency.case.budget.passes import Pass
from consistency.extras.training.trajectory.cost import STEPS

DRAWN = 4
"""Noisy passes of each step."""

TRAININGS = 2
"""Trainings with noise: with attention by one kernel, and by its formula."""

OWN, BY_BLOCKS, NOISE = "training", "every step, by blocks", "trainings with noise"


def passes(setting: Setting) -> tuple[Pass, ...]:
    """Return the passes of a worker; for the reference each step by blocks has one in float64 and some noisy ones."""
    steps, blocks = setting.case.steps or STEPS, setting.shape.blocks
    passes_per_step = 2 + DRAWN if setting.makes_reference else 1
    own = Pass(title=OWN, count=steps)
    by_blocks = Pass(title=BY_BLOCKS, count=steps * passes_per_step, blocks=blocks)
    if not setting.makes_reference:
        return own, by_blocks
    return own, by_blocks, Pass(title=NOISE, count=TRAININGS * steps)
