"""The declaration of the stage `collectives`. No torch here."""

from __future__ import annotations

from consistency.case.stage import Adapters, Kind, Model, Stage, StageSpec
from consistency.numerics.rules import Rule

COLLECTIVES = Stage("collectives")

# at level `thorough` too, where two cards are equal: `workflows/planning.py`
SPEC = StageSpec(
    stage=COLLECTIVES,
    place=130,
    kind=Kind.COMPUTES,
    rule=Rule.BOUND,
    worker="consistency.extras.training.collectives.worker:run",
    cost="consistency.extras.training.collectives.cost:collectives",
    short="coll",
    model=Model.UNUSED,
    levels=(),
    opens_devices=True,
    together=True,
    adapters=Adapters.NONE,
    with_equal_cards=True,
    other_rows=True,
    multiplies=False,
)
