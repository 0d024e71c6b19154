"""The declaration of the stage `base`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Adapters, Kind, StageSpec
from consistency.numerics.rules import Rule

SPEC = StageSpec(
    stage=standard.BASE,
    place=30,
    kind=Kind.MOVES,
    rule=Rule.BITWISE,
    worker="consistency.stages.base.worker:run",
    cost="consistency.stages.base.cost:base",
    again="consistency.stages.base.again:base",
    items="consistency.stages.base.items:base_items",
    adapters=Adapters.NONE,
    on_base=True,
    after_adapter="consistency.stages.base.worker:look_again",
)
