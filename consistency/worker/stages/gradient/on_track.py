"""The gradients to judge: as they are, or computed again with the decisions of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from consistency.worker import cpu_error
from consistency.worker.decisions.places import Places
from consistency.worker.decisions.replay import Made, Replay
from consistency.worker.decisions.track import Table
from consistency.worker.model.running import is_of_the_model
from consistency.worker.model.tensor_file import TensorFile
from consistency.worker.protocol import DECISIONS_FILE
from consistency.worker.stages.context import Context
from consistency.worker.stages.decision_flips import NOT_REPLAYED, ON_TRACK, record_flips
from consistency.worker.stages.gradient.runs import Watches

Again = Callable[[Watches, Places], TensorFile]
"""Compute the gradients once more, watched, and return them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Gradients to judge.

    Attributes
    ----------
    decisions : str
        Whose decisions are in them, where not this worker's own.
    reason : str
        Why they cannot be judged.
    """

    gradients: TensorFile
    decisions: str = ""
    reason: str = ""


def judged(context: Context, own: TensorFile, made: Made, again: Again) -> Judged:
    """Return a worker's gradients as they are if its decisions are those of the track; else computed again on it."""
    path = decisions_file(context)
    table = Table.of(path)
    if all(made.is_on(table, key) for key in made.passes()):
        return Judged(gradients=own)
    replay = Replay(path, context.model, cpu_error.products_on(context.model, context.device))
    try:
        gradients = again(replay.watch, replay.places)
    except Exception as error:  # model code of any kind may raise anything
        if not is_of_the_model(error, context.model):
            raise
        return Judged(gradients=own, reason=NOT_REPLAYED)
    record_flips(context, "gradient", replay.flips)
    if not all(replay.was_complete(key) for key in made.passes()):
        return Judged(gradients=own, reason=NOT_REPLAYED)
    return Judged(gradients=gradients, decisions=ON_TRACK)


def decisions_file(context: Context) -> Path:
    """Return the file of the track."""
    return context.scratch / DECISIONS_FILE.format("gradient")
