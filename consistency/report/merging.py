"""One line per case: the merged model against the unmerged one, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from consistency.capture.wording import and_more, some
from consistency.comparison.merging import Advice, Merging, rounding_dominates, unexplained_change
from consistency.comparison.outcomes import gathered
from consistency.numerics.real import Real

MERGING = "merging"
"""Title of the column of a suite."""

MERGING_LEGEND = f"{MERGING}: change of the outputs over what rounding W + ΔW makes unavoidable, and what to do"

_MOST = 3  # lines of captures that differ in these figures


def merging_texts(found: Sequence[Merging]) -> Iterator[str]:
    """Yield a line for the case, or one for each of several captures with figures of their own."""
    texts = gathered((merging_text(one), one.worker) for one in found)
    for text, workers in list(texts.items())[:_MOST]:
        where = f" ({some(workers)})" if len(texts) > 1 else ""
        yield f"merged against unmerged{where}: {text}"
    if rest := and_more(len(texts) - _MOST, "line"):
        yield f"{rest}: report.json has them all"


def merging_text(one: Merging) -> str:
    """Return what merging does to the outputs of a case, in one line."""
    if one.reason:
        return f"not merged: {one.reason}"
    if one.unmerged_error is not None and not math.isfinite(one.unmerged_error):
        return f"{_what(one)} are NaN or infinite in the unmerged model too: nothing to compare"
    figures = "; ".join(filter(None, [*_figures(one), _top1(one), _in_float32(one)]))
    advice = _advice(one)
    return f"{figures}. {advice[:1].upper()}{advice[1:]}" if advice else figures


def merging_cell(found: Sequence[Merging]) -> str:
    """Return the same in the fewest words, of one case or of several: y, and what follows."""
    ratios = [f"{_times(float(one.ratio))}×" for one in found if one.ratio is not None]
    advices = [one.advice or ("not merged" if one.reason else "") for one in found]
    return " ".join([*(ratios if len(found) == 1 else []), some([text for text in advices if text])]).strip()


def _figures(one: Merging) -> Iterator[str]:
    what = _what(one)
    if one.moved is None or one.must is None:
        yield f"merging changes {what} by at most {figure(one.computed)} as computed in {one.dtype}"
        if one.merged_error is not None:
            errors = f"the merged model by {figure(one.merged_error)}, the unmerged one by {figure(one.unmerged_error)}"
            yield f"float64 differs from {errors}"
        if one.left_out:
            yield f"what rounding makes unavoidable was not measured: {one.left_out}"
        return
    if one.ratio is None:
        yield f"merging in {one.dtype} does not change {what}"
        return
    times = f"{_times(float(one.ratio))}× what rounding W + ΔW makes unavoidable"
    times = times if float(one.must) else "rounding W + ΔW makes none unavoidable"
    yield f"merging in {one.dtype} changes {what} by at most {figure(one.moved)} ({times})"


def _top1(one: Merging) -> str:
    if one.positions is None or one.top1_changed is None:
        return ""
    unmerged = f" (unmerged {one.dtype} against float64: {one.top1_unmerged})" if one.top1_unmerged else ""
    if not one.top1_changed:
        return f"no top-1 token changes in {one.positions} positions{unmerged}"
    return f"the top-1 token changes in {one.top1_changed} of {one.positions} positions{unmerged}"


def _in_float32(one: Merging) -> str:
    return "" if one.float32 is None or one.ratio is None else f"merged in float32: {figure(one.float32)}"


def _advice(one: Merging) -> str:
    keep = "merge in float32 and keep it, or do not merge"
    own = f"the forward pass's own {one.dtype} error ({figure(one.unmerged_error)})"
    match one.advice:
        case Advice.NOT_FINITE:
            return "the merged model is not finite: do not merge; safe_merge=True raises an error at the layer"
        case Advice.DO_NOT_MERGE:
            other = figure(unexplained_change(one))
            why = f": {some(one.shared)} are one weight, and the adapter is beside one of them" if one.shared else ""
            return f"no rounding explains {other}, the merged model is another function{why}: do not merge"
        case Advice.MERGE_IN_FLOAT32:
            return "the merge loses more than rounding does: convert base and adapter to float32, merge, and round once"
        case Advice.KEEP_FLOAT32 if rounding_dominates(one):
            return f"the adapter itself changes them by {figure(one.adapter)}, no more than that rounding: {keep}"
        case Advice.KEEP_FLOAT32 if one.dtype == "float32":
            return f"this is rounding, but above {own}: for the same answers, do not merge"
        case Advice.KEEP_FLOAT32:
            return f"this is rounding, but above {own}: {keep}"
        case Advice.MERGE if one.ratio is not None:
            return f"this is below {own}: merging is safe"
    return one.advice


def _what(one: Merging) -> str:
    return "the logits" if one.output == "logits" else one.output


def figure(number: Real | None) -> str:
    """Write a figure to three digits."""
    return "?" if number is None else f"{float(number):.3g}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.3g}"
