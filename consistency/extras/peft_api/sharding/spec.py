"""The declaration of the stage `sharding`."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Kind, Level, Stage, StageSpec
from consistency.numerics.rules import Rule
from consistency.numerics.words import declare

SHARDING = Stage("sharding")

LABELS_CHANGED = declare("labels-changed", phrase="labels changed during transfer to a device")
CHANGED_ON_THE_WAY = declare("changed-on-the-way", phrase="values changed during transfer to a device")
OTHER_ANSWER = declare("other-answer", phrase="a different result than on one device")

# it loads the base twice more, which takes too long for the level `standard`
SPEC = StageSpec(
    stage=SHARDING,
    place=110,
    kind=Kind.FACTS,
    rule=Rule.LIMIT,
    worker="consistency.extras.peft_api.sharding.worker:run",
    cost="consistency.case.budget.costs:nothing",
    short="shard",
    levels=(Level.THOROUGH,),
    option="device_map",
    opens_devices=True,
    reads=(standard.FORWARD,),
    words=(LABELS_CHANGED, CHANGED_ON_THE_WAY, OTHER_ANSWER),
)
