"""`consistency.watch`: `Watch` for a loop of one's own or accelerate, `Callback` for transformers' Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from consistency.extras.watching.training_watch import TrainingError, Watch

if TYPE_CHECKING:
    from consistency.extras.watching.trainer_callback import Callback

__all__ = ["Callback", "TrainingError", "Watch"]


def __getattr__(name: str) -> Any:
    if name == "Callback":  # transformers is imported where it is used
        from consistency.extras.watching import trainer_callback

        return trainer_callback.Callback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
