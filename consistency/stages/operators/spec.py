"""The declaration of the stage `operators`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Adapters, Kind, Model, StageSpec
from consistency.numerics.rules import Rule

SPEC = StageSpec(
    stage=standard.OPERATORS,
    place=20,
    kind=Kind.COMPUTES,
    rule=Rule.BOUND,
    worker="consistency.stages.operators.worker:run",
    cost="consistency.case.budget.costs:without_model",
    short="ops",
    again="consistency.stages.operators.again:operators",
    model=Model.UNUSED,
    adapters=Adapters.NONE,
)
