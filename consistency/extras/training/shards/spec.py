"""Stage `shards`: what it declares."""

from __future__ import annotations

from consistency.case.stage import Kind, Stage, StageSpec
from consistency.numerics.rules import Rule
from consistency.numerics.words import declare

SHARDS = Stage("shards")

UNSYNCHRONIZED = declare(
    "unsynchronized",
    phrase="an adapter that each rank trains alone",
    computed="the rank's own gradient in place of the average",
)

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
)
