"""The declaration of the stage `transfer`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Adapters, Kind, Model, StageSpec
from consistency.numerics.rules import Rule

SPEC = StageSpec(
    stage=standard.TRANSFER,
    place=10,
    kind=Kind.MOVES,
    rule=Rule.BITWISE,
    worker="consistency.stages.transfer.worker:run",
    cost="consistency.case.budget.costs:without_model",
    short="trans",
    again="consistency.stages.transfer.again:transfer",
    model=Model.UNUSED,
    opens_devices=True,
    adapters=Adapters.NONE,
    other_rows=True,
)
