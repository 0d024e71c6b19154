"""The declaration of the stage `tensor-parallel`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Kind, Stage, StageSpec
from consistency.numerics.rules import Rule

TENSOR_PARALLEL = Stage("tensor-parallel")

SPEC = StageSpec(
    stage=TENSOR_PARALLEL,
    place=160,
    kind=Kind.COMPUTES,
    rule=Rule.BLOCK,
    worker="consistency.extras.training.tensor_parallel.worker:run",
    cost="consistency.extras.training.tensor_parallel.cost:tensor_parallel",
    short="tp",
    needs_adapter=True,
    levels=(),
    feeds_inputs=True,
    opens_devices=True,
    together=True,
    by=(standard.FORWARD, standard.GRADIENT),
)
