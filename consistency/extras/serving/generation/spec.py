"""The declaration of the stage `generation`."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Adapters, Kind, Level, Stage, StageSpec
from consistency.numerics.rules import Rule
from consistency.numerics.words import declare

GENERATION = Stage("generation")

SEQUENCES = 4
"""Side by side: as many as there are kinds of padding; each step of a batch takes as long as of one."""

WAYS = ("alone", "cache", "static_cache", "padded")
"""Ways in which the same tokens are computed, at every level."""

LONG_CACHE = "long_cache"
"""The way in which the long text of the stage `forward` is computed: its last tokens one by one."""

OTHER_TOKEN = declare("other-token", phrase="a token that rounding does not explain")
WRONG_ALONE = declare(
    "wrong-alone", phrase="a wrong result for one sequence at a time, and a right one for all together"
)
WRONG_WITH_CACHE = declare("wrong-with-cache", phrase="a wrong result with a cache, and a right one without")
WRONG_WITH_PADDING = declare("wrong-with-padding", phrase="a wrong result with padding, and a right one without")
BATCH_CHANGES_MODEL = declare(
    "batch-changes-the-model", phrase="in float64 too another result for one sequence at a time", of_device=WRONG_ALONE
)
CACHE_CHANGES_MODEL = declare(
    "cache-changes-the-model", phrase="in float64 too another result with a cache", of_device=WRONG_WITH_CACHE
)
PADDING_CHANGES_MODEL = declare(
    "padding-changes-the-model", phrase="in float64 too another result with padding", of_device=WRONG_WITH_PADDING
)

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
    words=(
        OTHER_TOKEN,
        WRONG_ALONE,
        WRONG_WITH_CACHE,
        WRONG_WITH_PADDING,
        BATCH_CHANGES_MODEL,
        CACHE_CHANGES_MODEL,
        PADDING_CHANGES_MODEL,
    ),
)
