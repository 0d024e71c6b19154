"""Faults of a model that is laid out over devices: what a broken copy or a wrong tokenizer gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, Undo, replace


def _in_moves(change: Callable[[torch.Tensor], torch.Tensor]) -> Install:
    """Change the labels on accelerate's way to a module's device."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def send(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            moved = real(tensor, *args, **kwargs)
            if isinstance(moved, dict) and isinstance(moved.get("labels"), torch.Tensor):
                moved = {**moved, "labels": change(moved["labels"])}
            return moved

        return send

    def install() -> Undo:
        from accelerate import hooks

        return replace(hooks, "send_to_device", wrap)

    return install


def _in_inputs(change: Callable[[dict[str, torch.Tensor], Any], None]) -> Install:
    """Change the batch before it is looked at."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def inputs(case: Any, model: Any) -> Any:
            found, reason = real(case, model)
            if found is not None:
                change(found, model)
            return found, reason

        return inputs

    def install() -> Undo:
        from consistency.worker.stages.sharding import stage as sharding

        return replace(sharding, "fixed_inputs", wrap)

    return install


def _old_bytes(labels: torch.Tensor) -> torch.Tensor:
    """Leave the bytes of two small integers where one large one should be, as memory that was used before does."""
    changed = labels.clone()
    changed[0, 3] = (7 << 32) + 5
    return changed


def _an_added_token(inputs: dict[str, torch.Tensor], model: Any) -> None:
    """Use the id of a token that was added to a tokenizer, and to no table of embeddings."""
    inputs["input_ids"][0, 5] = model.config.vocab_size + 3


FAULTS: dict[str, Install] = {
    "labels-changed-on-hop": _in_moves(_old_bytes),
    "ids-past-vocabulary": _in_inputs(_an_added_token),
}
