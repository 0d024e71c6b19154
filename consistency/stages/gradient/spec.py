"""The declaration of the stage `gradient`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Kind, Level, StageSpec
from consistency.numerics.rules import Rule

SPEC = StageSpec(
    stage=standard.GRADIENT,
    place=70,
    kind=Kind.COMPUTES,
    rule=Rule.BLOCK,
    worker="consistency.stages.gradient.worker:run",
    cost="consistency.case.budget.costs:gradient",
    short="grad",
    again="consistency.stages.gradient.again:gradient",
    needs_adapter=True,
    levels=(Level.STANDARD, Level.THOROUGH),
    feeds_inputs=True,
    whole="adapter_on",
    before=standard.FORWARD,  # whose merge leaves a tied weight's pages private: less memory is held here
    weight=1.1,
    passes="consistency.stages.gradient.passes:passes",
    reference_file="gradient.safetensors",
)
