"""The declaration of the stage `adapter`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Kind, StageSpec
from consistency.numerics.rules import Rule

SPEC = StageSpec(
    stage=standard.ADAPTER,
    place=40,
    kind=Kind.MOVES,
    rule=Rule.BITWISE,
    worker="consistency.stages.adapter.worker:run",
    cost="consistency.stages.adapter.cost:adapter",
    short="adapt",
    again="consistency.stages.adapter.again:adapter",
    items="consistency.stages.adapter.items:adapter_items",
    needs_adapter=True,
)
