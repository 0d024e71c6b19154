"""Faults of a model laid out over devices: wrong labels from a broken copy, ids from a wrong tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import changing, instead
from consistency.worker.model.id_checks import TOKEN_IDS


@changing("accelerate.hooks:send_to_device")
def old_bytes(moved: Any) -> Any:
    """Leave the bytes of two small integers where one large one should be, as memory that was used before does."""
    if not isinstance(moved, dict) or not isinstance(moved.get("labels"), torch.Tensor):
        return moved
    changed = moved["labels"].clone()
    changed[0, 3] = (7 << 32) + 5
    return {**moved, "labels": changed}


@instead("consistency.extras.peft_api.sharding.worker:fixed_inputs")
def an_added_token(real: Callable[..., Any], case: Any, model: Any) -> Any:
    """Use the id of a token that was added to a tokenizer, and to no table of embeddings."""
    inputs, reason = real(case, model)
    if inputs is not None:
        ids = next(inputs[name] for name in TOKEN_IDS if name in inputs)  # a model of speech has the decoder's alone
        ids[0, 5] = model.config.vocab_size + 3
    return inputs, reason
