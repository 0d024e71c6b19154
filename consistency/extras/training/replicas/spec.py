"""The declaration of the stage `replicas`. No torch here."""

from __future__ import annotations

from consistency.case.stage import Kind, Stage, StageSpec
from consistency.numerics.rules import Rule

REPLICAS = Stage("replicas")

SPEC = StageSpec(
    stage=REPLICAS,
    place=140,
    kind=Kind.COMPUTES,
    rule=Rule.BOUND,
    worker="consistency.extras.training.replicas.worker:run",
    cost="consistency.extras.training.replicas.cost:replicas",
    short="repl",
    needs_adapter=True,
    levels=(),
    feeds_inputs=True,
    opens_devices=True,
    together=True,
)
