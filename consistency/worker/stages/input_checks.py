"""Record the check of ids and labels before a device is asked for a row that no table has."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from consistency.worker.model.id_checks import Tables, look
from consistency.worker.stages.context import Context

INPUTS = "inputs"
"""Layer name of the rows about a stage's inputs."""


def inputs_fit(context: Context, stage: str, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Record the check of ids and labels on the CPU; report whether the model may run on a device.

    `forward` records only what is wrong; `sharding` records every check.
    """
    model, every = context.base.model, stage == "sharding"
    seen = look(inputs, Tables.of(model))
    if every or any(one.word for one in seen):  # else the tokenizer's file, which may be large, is not needed
        seen = look(inputs, Tables.of(model, context.base_folder))
    for one in seen:
        if one.word or every:
            context.record.fact(
                stage, INPUTS, one.name, status="outside" if one.word else "equal", word=one.word,
                evidence=one.evidence, reason=one.sentence,
            )  # fmt: skip
    return not any(one.word for one in seen)
