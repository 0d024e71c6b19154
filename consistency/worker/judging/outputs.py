"""Further judges of the outputs of the stage `forward` (`consistency.plugins.Plugin.output_judges`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from consistency.case.case import Case
from consistency.numerics.decisions import Watch
from consistency.worker.context import Context
from consistency.worker.model.running import Activations


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutputs:
    """The outputs from end to end that the stage `forward` has computed on the CPU."""

    model: torch.nn.Module
    inputs: Activations
    drawn: Mapping[str, Sequence[torch.Tensor]]
    """Logits of noisy passes in the tested dtype, by mode."""
    exact: Mapping[str, torch.Tensor]
    """Logits of float64 passes, by mode; a merged adapter has those of the adapter that is not merged."""
    failures: Mapping[str, str]
    """The reason why a mode has none, by mode."""
    again: Callable[[], Watch | None]
    """Returns a watch by which another pass follows the decisions of the float64 pass, None where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputJudge:
    """A judge of the outputs.

    Attributes
    ----------
    is_asked : callable
        Reports whether a case wants it: noisy passes from end to end are computed then.
    judge : callable
        Records its results.
    """

    is_asked: Callable[[Case], bool]
    judge: Callable[[Context, ForwardOutputs], None]
