"""The adapter that a sharded model saves, read again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import load_peft_weights
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from consistency.capture.names import adapter_place
from consistency.case.stages import Stage
from consistency.worker.ranks.group import Joined
from consistency.worker.stages.context import Context

SAVED = "saved"


def record_saved(
    context: Context, ranks: Joined, stage: Stage, model: torch.nn.Module, gathered: Mapping[str, torch.Tensor]
) -> None:
    """Save the adapter as accelerate does, from the first rank, and compare each rank's tensors with the file.

    Parameters
    ----------
    gathered : mapping of str to torch.Tensor
        The adapter's parameters as this rank sees them, whole and on the CPU, by name in the model.
    """
    folder = ranks.folder / SAVED
    with ranks.calling("saving the adapter"):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        state: dict[str, Any] = get_model_state_dict(model, options=options)
        if ranks.rank == 0:
            adapted: Any = model
            adapted.save_pretrained(str(folder), state_dict=state)
    ranks.answers("the adapter is saved", "")
    in_file = load_peft_weights(str(folder), device="cpu")
    for name, tensor in gathered.items():
        key = context.expected[name][0]
        layer, part = adapter_place(key)
        if key in in_file:
            actual = in_file[key]
            context.record.moved(stage, layer, f"{part}.{SAVED}", actual=actual, expected=tensor.to(actual.dtype))
        else:
            context.record.absent(
                stage, layer, f"{part}.{SAVED}", status="missing", reason="not in the file that the ranks saved"
            )  # fmt: skip
