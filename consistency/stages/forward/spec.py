"""The declaration of the stage `forward`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Kind, Level, StageSpec
from consistency.numerics.rules import Rule

SPEC = StageSpec(
    stage=standard.FORWARD,
    place=60,
    kind=Kind.COMPUTES,
    rule=Rule.BLOCK,
    worker="consistency.stages.forward.worker:run",
    short="fwd",
    again="consistency.stages.forward.again:forward",
    items="consistency.stages.forward.items:forward_items",
    levels=(Level.STANDARD, Level.THOROUGH),
    feeds_inputs=True,
    option="engine_outputs",
    weight=0.3,
    passes="consistency.stages.forward.passes:passes",
    reference_file="reference.safetensors",
)
