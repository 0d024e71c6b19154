"""Kinds of findings about trainings, by several devices together and by each alone. No torch here."""

from __future__ import annotations

from consistency.comparison import kinds

REPLICA_DRIFT = kinds.declare("replica-drift")
HEALTHY_SPLIT = kinds.declare("healthy-split")
LEFT_TRAJECTORY = kinds.declare("left-trajectory")
KEPT_TRAJECTORY = kinds.declare("kept-trajectory")

KINDS = (REPLICA_DRIFT, HEALTHY_SPLIT, LEFT_TRAJECTORY, KEPT_TRAJECTORY)
