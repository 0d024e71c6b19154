"""One line per case: the merged model against the unmerged one, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from consistency.capture.wording import and_more, some
from consistency.comparison.merging import Advice, Merging, rounding_dominates, unexplained_change
from consistency.comparison.outcomes import group_by_key
from consistency.numerics.real import Real

MERGING = "merging"
"""Title of the column of a suite."""

MERGING_LEGEND = f"{MERGING}: change of the outputs over what rounding W + ΔW makes unavoidable, and what to do"

_MOST = 3  # lines of captures that differ in these figures


def merging_texts(records: Sequence[Merging]) -> Iterator[str]:
    """Yield a line for the case, or one for each of several captures with figures of their own."""
    workers_by_text = group_by_key((merging_text(record), record.worker) for record in records)
    for text, workers in list(workers_by_text.items())[:_MOST]:
        where = f" ({some(workers)})" if len(workers_by_text) > 1 else ""
        yield f"merged against unmerged{where}: {text}"
    if left_out := and_more(len(workers_by_text) - _MOST, "line"):
        yield f"{left_out}: report.json has them all"


def merging_text(record: Merging) -> str:
    """Return what merging does to the outputs of a case, in one line."""
    if record.reason:
        return f"not merged: {record.reason}"
    if record.unmerged_error is not None and not math.isfinite(record.unmerged_error):
        return f"{_outputs(record)} are NaN or infinite in the unmerged model too: nothing to compare"
    parts = [*_change_texts(record), _top1_text(record), _float32_text(record)]
    figures = "; ".join(part for part in parts if part)
    advice = _advice_text(record)
    return f"{figures}. {advice[:1].upper()}{advice[1:]}" if advice else figures


def merging_cell(records: Sequence[Merging]) -> str:
    """Return the cell of one case, `0.98× merge`; the cell of several cases has their advices alone."""
    words = []
    if len(records) == 1:
        words += [f"{_ratio_text(float(record.ratio))}×" for record in records if record.ratio is not None]
    advices = []
    for record in records:
        if record.advice:
            advices.append(str(record.advice))
        elif record.reason:
            advices.append("not merged")
    return " ".join([*words, some(advices)]).strip()


def _change_texts(record: Merging) -> Iterator[str]:
    """Yield the change of the outputs by merging, and its ratio to the change that rounding makes unavoidable."""
    outputs = _outputs(record)
    if record.moved is None or record.must is None:
        # Without the changes that rounding alone makes, there are only errors against float64.
        yield f"merging changes {outputs} by at most {figure(record.computed)} as computed in {record.dtype}"
        if record.merged_error is not None:
            merged, unmerged = figure(record.merged_error), figure(record.unmerged_error)
            yield f"float64 differs from the merged model by {merged}, the unmerged one by {unmerged}"
        if record.left_out:
            yield f"what rounding makes unavoidable was not measured: {record.left_out}"
        return
    if record.ratio is None:
        yield f"merging in {record.dtype} does not change {outputs}"
        return
    if float(record.must):
        relation = f"{_ratio_text(float(record.ratio))}× what rounding W + ΔW makes unavoidable"
    else:
        relation = "rounding W + ΔW makes no change unavoidable"
    yield f"merging in {record.dtype} changes {outputs} by at most {figure(record.moved)} ({relation})"


def _top1_text(record: Merging) -> str:
    if record.positions is None or record.top1_changed is None:
        return ""
    unmerged = ""
    if record.top1_unmerged:
        unmerged = f" (unmerged {record.dtype} against float64: {record.top1_unmerged})"
    if not record.top1_changed:
        return f"no top-1 token changes in {record.positions} positions{unmerged}"
    return f"the top-1 token changes in {record.top1_changed} of {record.positions} positions{unmerged}"


def _float32_text(record: Merging) -> str:
    if record.float32 is None or record.ratio is None:
        return ""
    return f"merged in float32: {figure(record.float32)}"


def _advice_text(record: Merging) -> str:
    keep = "merge in float32 and keep it, or do not merge"
    forward_error = f"the forward pass's own {record.dtype} error ({figure(record.unmerged_error)})"
    match record.advice:
        case Advice.NOT_FINITE:
            return "the merged model is not finite: do not merge; safe_merge=True raises an error at the layer"
        case Advice.DO_NOT_MERGE:
            change = figure(unexplained_change(record))
            why = ""
            if record.shared:
                why = f": {some(record.shared)} are one weight, and the adapter is beside one of them"
            return f"no rounding explains {change}, the merged model is another function{why}: do not merge"
        case Advice.MERGE_IN_FLOAT32:
            return "the merge loses more than rounding does: convert base and adapter to float32, merge, and round once"
        case Advice.KEEP_FLOAT32 if rounding_dominates(record):
            return f"the adapter itself changes them by {figure(record.adapter)}, no more than that rounding: {keep}"
        case Advice.KEEP_FLOAT32 if record.dtype == "float32":
            return f"this is rounding, but above {forward_error}: for the same answers, do not merge"
        case Advice.KEEP_FLOAT32:
            return f"this is rounding, but above {forward_error}: {keep}"
        case Advice.MERGE if record.ratio is not None:
            return f"this is below {forward_error}: merging is safe"
    return record.advice


def _outputs(record: Merging) -> str:
    return "the logits" if record.output == "logits" else record.output


def figure(number: Real | None) -> str:
    """Write a figure to three digits."""
    return "?" if number is None else f"{float(number):.3g}"


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.3g}"
