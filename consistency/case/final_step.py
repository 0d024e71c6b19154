"""Steps of a worker after its stages. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from consistency.case.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalStep:
    """A step that a plug-in adds (`consistency.plugins.Plugin.final_steps`).

    Attributes
    ----------
    name : str
        Its name in the progress, and in the table of memory.
    is_asked : callable
        Returns whether a case wants the step.
    seconds : callable
        Returns about how many seconds the step takes in a case that wants it, for the progress.
    run : str
        `module:function` that makes the step; it takes a `consistency.worker.context.AfterStages`.
    estimate : str
        `module:function` that estimates its memory from the stages' estimates, the case and the worker
        (`consistency.case.budget.estimate`); it returns a `StageEstimate`, or None where the step does nothing.
    """

    name: str
    is_asked: Callable[[Case], bool]
    seconds: Callable[[Case], float]
    run: str
    estimate: str
