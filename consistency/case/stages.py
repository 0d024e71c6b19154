"""Which stages there are, and which of them a level runs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from consistency.case.load_path import SIDES


class Stage(enum.StrEnum):
    """What is looked at, in the order in which the numbers depend on one another."""

    TRANSFER = "transfer"
    OPERATORS = "operators"
    BASE = "base"
    ADAPTER = "adapter"
    MERGED = "merged"
    FORWARD = "forward"
    GRADIENT = "gradient"
    MEMORY = "memory"
    SHARDING = "sharding"
    WRAPPING = "wrapping"


MODEL_LESS: tuple[Stage, ...] = (Stage.TRANSFER, Stage.OPERATORS, Stage.MEMORY)
"""Stages that say something of the machine alone. Of these `memory` looks at the model too, where there is one."""


class Level(enum.StrEnum):
    """How much is looked at: about a minute, some minutes, or a night."""

    QUICK = "quick"
    STANDARD = "standard"
    THOROUGH = "thorough"


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPlan:
    """What a level means; `sides` are the roads that it takes beside each default road."""

    stages: tuple[Stage, ...]
    safe_merge: bool
    reload: bool
    sides: tuple[str, ...]
    sequences: int
    tokens: int
    repeat: int
    not_looked_at: tuple[str, ...]


LARGE_COPIES = "copies of 256 MiB and more"

LEVELS: dict[Level, LevelPlan] = {
    Level.QUICK: LevelPlan(
        stages=(Stage.TRANSFER, Stage.OPERATORS, Stage.BASE, Stage.ADAPTER, Stage.MERGED),
        safe_merge=False,
        reload=False,
        sides=(),
        sequences=1,
        tokens=16,
        repeat=1,
        not_looked_at=(
            LARGE_COPIES,
            "most operators",
            "large operators",
            "safe_merge",
            "the adapter loaded again over NaN",
            "a second run on the same device",
        ),
    ),
    Level.STANDARD: LevelPlan(
        # sharding loads the base twice more, which takes a large one out of "some minutes"
        stages=tuple(s for s in Stage if s not in (Stage.SHARDING, Stage.WRAPPING)),
        safe_merge=True,
        reload=True,  # the adapter again, over poison: some tenths of a second
        sides=("cpu", "low-memory"),  # with the default road, enough to tell copy path, device and dtype apart
        sequences=8,  # a classifier answers once per sequence, and few answers tell little: `tolerance.luck`
        tokens=16,
        repeat=1,
        not_looked_at=(LARGE_COPIES, "large operators", "a second run on the same device"),
    ),
    Level.THOROUGH: LevelPlan(
        stages=tuple(s for s in Stage if s is not Stage.WRAPPING),  # which needs a wrapper of the user's own
        safe_merge=True,
        reload=True,
        sides=SIDES,
        sequences=16,
        tokens=64,
        repeat=2,
        not_looked_at=(),
    ),
}
