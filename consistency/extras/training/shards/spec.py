"""The declaration of the stage `shards`. No torch here."""

from __future__ import annotations

from consistency.case.stage import Kind, Stage, StageSpec
from consistency.extras.training.words import UNSYNCHRONIZED
from consistency.numerics.rules import Rule

SHARDS = Stage("shards")


SPEC = StageSpec(
    stage=SHARDS,
    place=150,
    kind=Kind.COMPUTES,
    rule=Rule.BOUND,
    worker="consistency.extras.training.shards.worker:run",
    cost="consistency.extras.training.shards.cost:shards",
    short="fsdp",
    needs_adapter=True,
    levels=(),
    feeds_inputs=True,
    opens_devices=True,
    together=True,
    words=(UNSYNCHRONIZED,),
)
