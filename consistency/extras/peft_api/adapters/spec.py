"""The declaration of the stage `adapters`."""

from __future__ import annotations

from consistency.case.stage import Adapters, Kind, Needs, Stage, StageSpec
from consistency.numerics.rules import Rule
from consistency.numerics.words import declare

ADAPTERS = Stage("adapters")

LEFT_BEHIND = declare("left-behind", phrase="tensors of a deleted adapter left in the model")
OTHERS_INTERFERE = declare("others-interfere", phrase="results that change with what else was loaded, set or deleted")
DRIFT = declare("drift", phrase="weights that merging and unmerging moves further than rounding can")
WRONG_DENSITY = declare("wrong-density", phrase="another share of elements kept than chance explains")

# with several adapters alone
SPEC = StageSpec(
    stage=ADAPTERS,
    place=90,
    kind=Kind.COMPUTES,
    rule=Rule.BITWISE,
    worker="consistency.extras.peft_api.adapters.worker:run",
    cost="consistency.extras.peft_api.adapters.cost:adapters",
    short="multi",
    needs_adapter=True,
    levels=(),
    option="adapters",
    weight=8.0,
    adapters=Adapters.ALL,
    named_where_left_out=False,
    leaves_out=(
        "routing by create_arrow_model",
        "ties, magnitude_prune and types that cut what they leave of deltas, by a closed form",
    ),
    needs=Needs(sentence="the stage adapters needs several adapters", wanted="--adapter NAME=PATH for each of them"),
    words=(LEFT_BEHIND, OTHERS_INTERFERE, DRIFT, WRONG_DENSITY),
)
