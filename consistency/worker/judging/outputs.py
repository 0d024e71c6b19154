"""What judges more by the outputs of the stage `forward` (`consistency.plugins.Plugin.output_judges`)."""

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
    """The logits from end to end that the stage `forward` has computed on the CPU."""

    model: torch.nn.Module
    inputs: Activations
    drawn: Mapping[str, Sequence[torch.Tensor]]
    """Those of passes with noise in the tested dtype, by mode."""
    exact: Mapping[str, torch.Tensor]
    """Those in float64; a merged adapter has those of one that is not."""
    failures: Mapping[str, str]
    """Why a mode has none."""
    again: Callable[[], Watch | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputJudge:
    """One of them.

    Attributes
    ----------
    is_asked : callable
        Whether a case wants it: passes with noise are made of the outputs from end to end then.
    judge : callable
        Records what it finds.
    """

    is_asked: Callable[[Case], bool]
    judge: Callable[[Context, ForwardOutputs], None]
