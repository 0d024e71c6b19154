"""Ids and labels of a stage's inputs, as records: before any device is asked for a row that no table has."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from consistency.worker.model.id_checks import Tables, look
from consistency.worker.stages.context import Context

INPUTS = "inputs"
"""Layer name of the rows about what a stage feeds the model."""


def inputs_fit(context: Context, stage: str, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Record what the CPU sees of ids and labels; tell whether a device may be asked.

    The stage `forward` says only what is wrong; `sharding` is about them.
    """
    model, told = context.base.model, stage == "sharding"
    seen = look(inputs, Tables.of(model))
    if told or any(one.word for one in seen):  # else the tokenizer's file, which may be large, has nothing to say
        seen = look(inputs, Tables.of(model, context.base_folder))
    for one in seen:
        if one.word or told:
            context.record.fact(
                stage=stage,
                layer=INPUTS,
                tensor=one.name,
                status="outside" if one.word else "equal",
                diagnosis=one.word,
                evidence=one.evidence,
                reason=one.sentence,
            )
    return not any(one.word for one in seen)
