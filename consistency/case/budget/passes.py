"""The passes that a stage makes of the model, as one value: progress, remaining time, and `--plan` read it.

A stage names a function of its own that tells them from headers alone (`StageSpec.passes`). No torch here.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

from consistency.case.stage import Stage
from consistency.case.stages import SPECS

if TYPE_CHECKING:
    from consistency.case.budget.costs import Setting


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """Passes of one kind, one after the other.

    Attributes
    ----------
    title : str
        Their name in the progress.
    count : int
        How many there are.
    blocks : int
        Blocks of the model that each pass takes in turn; 0 where it runs the model as a whole.
    weight : float
        How long one pass takes, relative to the other passes of the same stage.
    """

    title: str
    count: int = 1
    blocks: int = 0
    weight: float = 1.0


def passes_of(stage: Stage, setting: Setting) -> tuple[Pass, ...]:
    """Return the passes of a stage in the order in which a worker makes them; none where the stage declares none."""
    function = SPECS[stage].passes
    if not function:
        return ()
    passes: tuple[Pass, ...] = pkgutil.resolve_name(function)(setting)
    return passes


def weight_of(stage: Stage, passes: Sequence[Pass]) -> float:
    """Return the nominal weight of a stage: about how many seconds it takes of a small model."""
    return SPECS[stage].weight * (_sum_weights(passes) if passes else 1.0)


def part_of(passes: Sequence[Pass], title: str) -> tuple[float, float] | None:
    """Return where in a stage, from 0 to 1, the passes of a title begin and end; None where it declares no such pass.

    `passes` are those of the stage, in their order.
    """
    titles = [each.title for each in passes]
    if title not in titles:
        return None
    total, index = _sum_weights(passes), titles.index(title)
    ends = [0.0, *accumulate(each.count * each.weight for each in passes)]
    return ends[index] / total, ends[index + 1] / total


def _sum_weights(passes: Sequence[Pass]) -> float:
    return sum(each.count * each.weight for each in passes)
