"""The declaration of the stage `memory`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Adapters, Kind, Level, Model, StageSpec
from consistency.numerics.rules import Rule
from consistency.numerics.words import declare

WRONG_DEVICE = declare("wrong-device", phrase="adapter tensors on a different device than their model")
THIRD_COPY = declare("third-copy", phrase="a new weight allocated beside the old one and the delta")

SPEC = StageSpec(
    stage=standard.MEMORY,
    place=100,
    kind=Kind.FACTS,
    rule=Rule.LIMIT,
    worker="consistency.stages.memory.worker:run",
    cost="consistency.stages.memory.cost:memory",
    short="mem",
    model=Model.OPTIONAL,
    levels=(Level.STANDARD, Level.THOROUGH),
    adapters=Adapters.NONE,
    words=(WRONG_DEVICE, THIRD_COPY),
)
