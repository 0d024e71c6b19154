"""Stage `wrapping`: what it declares."""

from __future__ import annotations

from consistency.case.stage import Adapters, Kind, Needs, Stage, StageSpec
from consistency.numerics.rules import Rule

WRAPPING = Stage("wrapping")

SPEC = StageSpec(
    stage=WRAPPING,
    place=170,
    kind=Kind.FACTS,
    rule=Rule.LIMIT,
    worker="consistency.extras.peft_api.wrapping.worker:run",
    cost="consistency.case.budget.costs:nothing",
    short="wrap",
    levels=(),
    option="wrapper",
    adapters=Adapters.NONE,
    needs=Needs(
        sentence="nothing wraps the base",
        wanted="--wrapper python:package.module:function",
        hint="the function takes the plain model and returns it wrapped",
    ),
)
