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
        As the progress names them.
    count : int
        How many there are.
    blocks : int
        Blocks of the model that each takes in turn; 0 where it runs the model as a whole.
    weight : float
        How long one takes, beside those of the same stage.
    """

    title: str
    count: int = 1
    blocks: int = 0
    weight: float = 1.0


def passes_of(stage: Stage, setting: Setting) -> tuple[Pass, ...]:
    """Return the passes of a stage in the order in which a worker makes them; none where it declares none."""
    reference = SPECS[stage].passes
    if not reference:
        return ()
    passes: tuple[Pass, ...] = pkgutil.resolve_name(reference)(setting)
    return passes


def weight_of(stage: Stage, passes: Sequence[Pass]) -> float:
    """Return the nominal weight of a stage: about how many seconds it takes of a small model."""
    return SPECS[stage].weight * (_sum_of(passes) if passes else 1.0)


def part_of(passes: Sequence[Pass], title: str) -> tuple[float, float] | None:
    """Return from which share of a stage to which the passes of a title go; None where it declares none of it."""
    titles = [one.title for one in passes]
    if title not in titles:
        return None
    whole, number = _sum_of(passes), titles.index(title)
    ends = [0.0, *accumulate(one.count * one.weight for one in passes)]
    return ends[number] / whole, ends[number + 1] / whole


def _sum_of(passes: Sequence[Pass]) -> float:
    return sum(one.count * one.weight for one in passes)
