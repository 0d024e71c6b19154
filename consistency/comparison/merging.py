"""Advice on merging, from the effect that it has on the outputs: a fact of the case, and no finding.

Everything is compared with another figure of the same case, and with nothing else:

* Rounding W + dW once moves the outputs by `must`. PEFT rounds twice at most, the delta and the sum, so a merge that
  moves them by more than twice that loses something else.
* Computing in the dtype moves the outputs by `unmerged_error`, merged or not. A smaller effect makes no difference.
* A float32 merge rounds too, by less: the figures of another dtype shrink with its unit roundoff. It can also move the
  outputs because its delta is of lower precision, at worst one in bfloat16: by `BF16_DELTA` of the adapter's effect.
  Where even that does not explain it, the merged model is another function. The same holds where merging in float64
  moves the outputs by more than float32 could.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

import msgspec

from consistency.capture.merge_effect import MergeEffect
from consistency.comparison.workers import ComparedWorker
from consistency.numerics.real import Real
from consistency.numerics.rules import UNIT_ROUNDOFF

BF16_DELTA = 3 * UNIT_ROUNDOFF["bfloat16"]
"""Largest relative error of a delta whose factors, product and scaling are in bfloat16 (`numerics.bound`)."""

_TWO_ROUNDINGS = 2


class Advice(enum.StrEnum):
    """Advice that follows from the figures of a merge."""

    MERGE = "merge"
    KEEP_FLOAT32 = "keep-float32"
    MERGE_IN_FLOAT32 = "merge-in-float32"
    DO_NOT_MERGE = "do-not-merge"
    NOT_FINITE = "not-finite"
    UNKNOWN = ""


_ADVICE_TO_MERGE = (Advice.MERGE, Advice.KEEP_FLOAT32, Advice.MERGE_IN_FLOAT32)


class Merging(MergeEffect, frozen=True, kw_only=True):
    """The effect of merging on the outputs, as the reference worker of a capture measured it.

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
    """Return the effect of merging for each capture whose worker measured it.

    Where a weight is `wrong`, no merge is advised.
    """
    results = []
    for worker in workers:
        if worker.merging is None:
            continue
        merging = judged(worker.label, worker.merging)
        # figures of a model with a wrong weight promise nothing
        if wrong and merging.advice in _ADVICE_TO_MERGE:
            merging = msgspec.structs.replace(merging, advice="")
        results.append(merging)
    return tuple(results)


def judged(worker: str, effect: MergeEffect) -> Merging:
    """Return the figures of a worker with the ratio and the advice that follow from them."""
    fields = msgspec.structs.asdict(effect)
    return Merging(worker=worker, ratio=_ratio(effect), advice=_advice(effect), **fields)


def unexplained_change(effect: MergeEffect) -> Real | None:
    """Return the change of the outputs by a merge in float64 or float32, if it is more than rounding explains.

    None where rounding explains it, or it was not measured.
    """
    limit = _scaled_to_float32(effect, effect.unmerged_error)
    in_float32 = effect.moved if effect.dtype == "float32" else effect.float32
    # "not <=" and not ">", so that NaN is unexplained
    if effect.exact is not None and not float(effect.exact) <= limit:
        return effect.exact
    if in_float32 is None or effect.adapter is None:
        return None
    limit = max(limit, BF16_DELTA * float(effect.adapter))
    return None if float(in_float32) <= limit else in_float32


def rounding_dominates(effect: MergeEffect) -> bool:
    """Return whether rounding moves the outputs as much as the adapter does."""
    return effect.must is not None and effect.adapter is not None and effect.must >= effect.adapter > 0


def _ratio(effect: MergeEffect) -> Real | None:
    """Return the change of the outputs over the change that rounding alone makes; None where there is no change."""
    if effect.moved is None or effect.must is None or float(effect.moved) == 0:
        return None
    if float(effect.must) == 0:
        return Real(math.inf)
    return Real(float(effect.moved) / float(effect.must))


def _advice(effect: MergeEffect) -> Advice:
    """Return the advice that the figures give; the module's docstring derives it."""
    if not _are_finite(effect.computed, effect.merged_error, effect.moved):
        # where the unmerged model overflows too, merging is not to blame
        return Advice.NOT_FINITE if _are_finite(effect.unmerged_error) else Advice.UNKNOWN
    if effect.moved is None or effect.must is None or effect.unmerged_error is None:
        return Advice.UNKNOWN
    moved, must, computing = float(effect.moved), float(effect.must), float(effect.unmerged_error)
    if unexplained_change(effect) is not None:
        return Advice.DO_NOT_MERGE
    # PEFT rounds twice at most; a change below the error of computing in the dtype makes no difference
    if moved > max(_TWO_ROUNDINGS * must, computing):
        return Advice.MERGE_IN_FLOAT32
    # rounding the merged weight to the dtype is what moves the outputs, so float32 weights avoid it
    if moved > computing or rounding_dominates(effect):
        return Advice.KEEP_FLOAT32
    return Advice.MERGE


def _scaled_to_float32(effect: MergeEffect, figure: Real | None) -> float:
    """Return the figure that rounding in float32 would give, from one of rounding in the dtype."""
    return float(figure or 0.0) * UNIT_ROUNDOFF["float32"] / UNIT_ROUNDOFF.get(effect.dtype, UNIT_ROUNDOFF["float32"])


def _are_finite(*figures: Real | None) -> bool:
    """Return whether all figures that were measured are finite."""
    return all(math.isfinite(float(figure)) for figure in figures if figure is not None)
