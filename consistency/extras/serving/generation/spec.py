"""Stage `generation`: what it declares."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Adapters, Kind, Level, Stage, StageSpec
from consistency.numerics.rules import Rule

GENERATION = Stage("generation")

SEQUENCES = 4
"""Side by side: as many as there are kinds of padding; each step of a batch takes as long as of one."""

WAYS = ("alone", "cache", "static_cache", "padded")
"""Ways in which the same tokens are computed, at every level."""

# several passes of one token at a time, so not of the level `standard`
SPEC = StageSpec(
    stage=GENERATION,
    place=120,
    kind=Kind.FACTS,
    rule=Rule.LIMIT,
    worker="consistency.extras.serving.generation.worker:run",
    cost="consistency.case.budget.costs:nothing",
    short="gen",
    items="consistency.extras.serving.generation.items:generation_items",
    levels=(Level.THOROUGH,),
    feeds_inputs=True,
    by=(standard.FORWARD,),
    adapters=Adapters.NONE,
    reference_file="generation.safetensors",
)
