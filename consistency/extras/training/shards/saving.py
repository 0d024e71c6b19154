"""The adapter that a sharded model saves, read again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import load_peft_weights
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from consistency.capture.names import adapter_place
from consistency.capture.records import RecordStatus
from consistency.case.stage import Stage
from consistency.extras.training.ranks.group import JoinedGroup
from consistency.numerics import words
from consistency.numerics.diagnosis_moved import diagnose_moved, diagnose_structure
from consistency.numerics.distance import measure
from consistency.numerics.words import Word
from consistency.worker.context import Context
from consistency.worker.model.running import model_code
from consistency.worker.recorder import Skip

SAVED = "saved"


def record_saved(
    context: Context, ranks: JoinedGroup, stage: Stage, model: torch.nn.Module, gathered: Mapping[str, torch.Tensor]
) -> None:
    """Save the adapter as accelerate does, from the first rank, which compares the file with the ranks' parameters.

    Parameters
    ----------
    gathered : mapping of str to torch.Tensor
        The adapter's parameters, put together from the parts of all ranks, on the CPU, by name in the model.
    """
    folder = ranks.folder / SAVED
    with ranks.in_library("saving the adapter"):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        state: dict[str, Any] = get_model_state_dict(model, options=options)
        # all ranks take part in gathering, and one writes the file
        if ranks.rank != 0:
            return
        try:
            with model_code(model, "PEFT does not save it from a model in parts: "):
                adapted: Any = model
                adapted.save_pretrained(str(folder), state_dict=state)
        except Skip as skip:  # the other ranks go on
            context.record.skipped(stage, str(skip), SAVED)
            return
    saved = load_peft_weights(str(folder), device="cpu")
    for name, whole in gathered.items():
        key = context.expected[name][0]
        layer, tensor = adapter_place(key)
        word: Word | None = words.MISSING
        evidence: dict[str, Any] = {}
        reason: str | None = "not in the file that the ranks saved"
        if key in saved:
            word, evidence = _difference(saved[key], whole.to(saved[key].dtype))
            reason = None
        status: RecordStatus = "equal" if word is None else "outside"
        context.record.fact(
            stage,
            layer,
            f"{tensor}.{SAVED}",
            status=status,
            word=word,
            evidence=evidence,
            reason=reason,
        )


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> tuple[Word | None, dict[str, Any]]:
    """Return the word and the evidence of a difference; no word where the tensors are equal."""
    diagnosis = diagnose_structure(actual, expected)
    if diagnosis is None:
        measured = measure(actual, expected)
        if not measured.mismatched:
            return None, {}
        diagnosis = diagnose_moved(actual, expected, measured)
    return diagnosis.word, dict(diagnosis.evidence)
