"""Stage `generation`: what it declares."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Adapters, Kind, Level, Stage, StageSpec
from consistency.numerics.rules import Rule

GENERATION = Stage("generation")

# several passes of one token at a time, so not of the level `standard`
SPEC = StageSpec(
    stage=GENERATION,
    place=120,
    kind=Kind.FACTS,
    rule=Rule.LIMIT,
    worker="consistency.extras.serving.generation.worker:run",
    cost="consistency.case.budget.costs:nothing",
    short="gen",
    items="consistency.pytest_plugin.item_names:generation_items",
    levels=(Level.THOROUGH,),
    feeds_inputs=True,
    by=(standard.FORWARD,),
    adapters=Adapters.NONE,
    reference_file="generation.safetensors",
)
