"""The declaration of the stage `wrapping`."""

from __future__ import annotations

from consistency.case.stage import Adapters, Kind, Needs, Stage, StageSpec
from consistency.numerics.rules import Rule
from consistency.numerics.words import declare

WRAPPING = Stage("wrapping")

LAYERS_MISSED = declare("layers-missed", phrase="adapter layers that PEFT does not find through the wrapper")
HIDDEN = declare("hidden", phrase="attributes hidden by the wrapper")
KEYS = declare("keys", phrase="different keys through the wrapper")
HELD_TWICE = declare("held-twice", phrase="storages held twice")
MORE_MEMORY = declare("more-memory", phrase="more memory in a training step than without the wrapper")

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
    words=(LAYERS_MISSED, HIDDEN, KEYS, HELD_TWICE, MORE_MEMORY),
)
