"""What to do about merging, from what it does to the outputs: a fact of the case, and no finding.

Everything is compared with another figure of the same case, and with nothing else:

* Rounding W + dW once moves the outputs by `must`. PEFT rounds twice at most, the delta and the sum, so a merge that
  moves them by more than twice that loses something else.
* Computing in the dtype moves the outputs by `unmerged_error`, merged or not. What is smaller makes no difference.
* A float32 merge rounds too, by less: the figures of another dtype shrink with its unit roundoff. What it moves the
  outputs by can also be a delta of lower precision, at worst one in bfloat16: `BF16_DELTA` of what the adapter does.
  Where even that does not explain it, the merged model is another function. The same holds where merging in float64
  moves the outputs by more than float32 could.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence

import msgspec

from consistency.capture.merge_effect import MergeEffect
from consistency.comparison.workers import ComparedWorker
from consistency.numerics.real import Real
from consistency.numerics.rules import UNIT_ROUNDOFF

BF16_DELTA = 3 * UNIT_ROUNDOFF["bfloat16"]
"""Largest relative error of a delta whose factors, product and scaling are in bfloat16 (`numerics.bound`)."""

_TWO_ROUNDINGS = 2


class Advice(enum.StrEnum):
    """What follows from the figures."""

    MERGE = "merge"
    KEEP_FLOAT32 = "keep-float32"
    MERGE_IN_FLOAT32 = "merge-in-float32"
    DO_NOT_MERGE = "do-not-merge"
    NOT_FINITE = "not-finite"
    UNKNOWN = ""


class Merging(MergeEffect, frozen=True, kw_only=True):
    """What merging does to the outputs, by the reference worker of a capture.

    Attributes
    ----------
    worker : str
    ratio : float or None
        `moved` over `must`; None where merging does not move the outputs, or was not measured.
    advice : str
        A member of `Advice`.
    """

    worker: str
    ratio: Real | None = None
    advice: str = ""


def mergings(workers: Iterable[ComparedWorker], *, wrong: bool = False) -> tuple[Merging, ...]:
    """Return what merging does, of each capture whose worker measured it; where a weight is wrong, none is advised."""
    found = (judged(worker.label, worker.merging) for worker in workers if worker.merging is not None)
    unsafe = (Advice.MERGE, Advice.KEEP_FLOAT32, Advice.MERGE_IN_FLOAT32) if wrong else ()
    return tuple(msgspec.structs.replace(one, advice="") if one.advice in unsafe else one for one in found)


def judged(worker: str, effect: MergeEffect) -> Merging:
    """Return the figures of a worker with what follows from them."""
    fields = msgspec.structs.asdict(effect)
    return Merging(worker=worker, ratio=_ratio(effect), advice=_advice(effect), **fields)


def unexplained_change(effect: MergeEffect) -> Real | None:
    """Return what a merge without rounding moves the outputs by, where that is more than rounding explains."""
    limit = _of_float32(effect, effect.unmerged_error)
    in_float32 = effect.moved if effect.dtype == "float32" else effect.float32
    if effect.exact is not None and not float(effect.exact) <= limit:
        return effect.exact
    if in_float32 is not None and effect.adapter is not None:
        limit = max(limit, BF16_DELTA * float(effect.adapter))
        return None if float(in_float32) <= limit else in_float32
    return None


def rounding_dominates(effect: MergeEffect) -> bool:
    """Return whether rounding moves the outputs as much as the adapter does."""
    return effect.must is not None and effect.adapter is not None and effect.must >= effect.adapter > 0


def _ratio(effect: MergeEffect) -> Real | None:
    if effect.moved is None or effect.must is None or float(effect.moved) == 0:
        return None
    return Real(float(effect.moved) / float(effect.must)) if float(effect.must) else Real(math.inf)


def _advice(effect: MergeEffect) -> Advice:
    if not all(map(math.isfinite, _numbers((effect.computed, effect.merged_error, effect.moved)))):
        unmerged = _numbers((effect.unmerged_error,))
        return Advice.NOT_FINITE if all(map(math.isfinite, unmerged)) else Advice.UNKNOWN
    if effect.moved is None or effect.must is None or effect.unmerged_error is None:
        return Advice.UNKNOWN
    moved, must, computing = float(effect.moved), float(effect.must), float(effect.unmerged_error)
    if unexplained_change(effect) is not None:
        return Advice.DO_NOT_MERGE
    if moved > max(_TWO_ROUNDINGS * must, computing):
        return Advice.MERGE_IN_FLOAT32
    return Advice.KEEP_FLOAT32 if moved > computing or rounding_dominates(effect) else Advice.MERGE


def _of_float32(effect: MergeEffect, figure: Real | None) -> float:
    """Return what a figure of rounding in the dtype would be in float32."""
    return float(figure or 0.0) * UNIT_ROUNDOFF["float32"] / UNIT_ROUNDOFF.get(effect.dtype, UNIT_ROUNDOFF["float32"])


def _numbers(figures: Sequence[Real | None]) -> list[float]:
    return [float(figure) for figure in figures if figure is not None]
