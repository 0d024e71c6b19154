"""The declaration of the stage `trajectory`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Kind, Stage, StageSpec
from consistency.numerics.rules import Rule

TRAJECTORY = Stage("trajectory")

STEPWISE = "steps"
"""Tensor of the row that says why steps are not judged."""

# on request alone: every step takes some passes on the CPU
SPEC = StageSpec(
    stage=TRAJECTORY,
    place=80,
    kind=Kind.COMPUTES,
    rule=Rule.BLOCK,
    worker="consistency.extras.training.trajectory.worker:run",
    cost="consistency.extras.training.trajectory.cost:trajectory",
    short="traj",
    needs_adapter=True,
    levels=(),
    feeds_inputs=True,
    option="steps",
    before=standard.FORWARD,
    whole="curve",
    weight=0.7,
    passes="consistency.extras.training.trajectory.passes_of_steps:passes",
    own_noise=True,
    reference_file="trajectory.safetensors",
)
