"""The declaration of the stage `merged`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Kind, StageSpec
from consistency.numerics.rules import Rule

SPEC = StageSpec(
    stage=standard.MERGED,
    place=50,
    kind=Kind.COMPUTES,
    rule=Rule.BOUND,
    worker="consistency.stages.merged.worker:run",
    cost="consistency.stages.merged.cost:merged",
    short="merge",
    again="consistency.stages.merged.again:merged",
    items="consistency.stages.merged.items:merged_items",
    needs_adapter=True,
    weight=4.0,
)
