"""What inference engines answered: a cause where one explains the numbers, and what was compared of them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from consistency.capture.names import ADAPTER_OFF, BATCHES, NOT_IN_FILE
from consistency.capture.wording import listed, some
from consistency.case import standard
from consistency.comparison import kinds
from consistency.comparison.findings.details import describe
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.result import BAD, Finding, Outcome, TensorComparison
from consistency.comparison.workers import ComparedWorker
from consistency.extras.serving.causes import CAUSE, PLACES, ROWS, SEVERAL, Cause
from consistency.extras.serving.inference.request import OUTPUT
from consistency.extras.serving.kinds import BATCH_VARIANT, PART_COMPARED
from consistency.numerics import words
from consistency.numerics.words import Word

_Rows = list[tuple[TensorComparison, Outcome]]


def find_engines(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Report what is wrong with the outputs of inference engines, by cause, and what was compared of them."""
    for engine in (worker for worker in evidence.workers if worker.is_engine and worker.info.status == "ok"):
        rows = [
            (t, row)
            for t in evidence.tensors
            if t.stage == standard.FORWARD and (row := t.outcome(engine.label)) is not None
        ]
        yield from _wrong(engine, [(t, row) for t, row in rows if t.layer == OUTPUT and row.status in BAD])
        yield from _batches(engine, [(t, row) for t, row in rows if t.layer == BATCHES])
        yield from _part(engine, rows)
        outputs = [(t, row) for t, row in rows if t.layer == OUTPUT]
        if outputs and all(row.status == "skipped" for _, row in outputs):
            yield Finding(
                kind=kinds.NOTHING_COMPARED,
                severity="error",
                message=f"forward · {engine.label} · nothing was compared of this engine: {_why_nothing(outputs)}",
                workers=(engine.label,),
                tensors=tuple(t.name for t, _ in outputs),
            )


def _why_nothing(outputs: _Rows) -> str:
    """Return why none of an engine's rows could be compared; what it was not asked for is no reason by itself."""
    reasons = dict.fromkeys(row.reason for _, row in outputs if row.reason and row.reason != NOT_IN_FILE)
    if reasons:
        return "; ".join(reasons)
    modes = dict.fromkeys(tensor.tensor for tensor, _ in outputs)
    return f"its file has no outputs of {', '.join(modes)}, and the run has no others"


def of_devices(evidence: ComparisonEvidence, tensors: Sequence[TensorComparison]) -> list[TensorComparison]:
    """Return tensors without the rows of inference engines, which the causes of devices do not explain."""
    engines = {worker.label for worker in evidence.workers if worker.is_engine}
    if not engines:
        return list(tensors)
    found = []
    for tensor in tensors:
        if not engines.intersection(tensor.workers):
            found.append(tensor)
            continue
        kept = tuple(one.of(left) for one in tensor.outcomes if (left := _without(one.workers, engines)))
        if kept:
            classes = tuple(left for names in tensor.classes if (left := _without(names, engines)))
            left = _without(tensor.workers, engines)
            found.append(msgspec.structs.replace(tensor, outcomes=kept, classes=classes, workers=left))
    return found


def _without(names: Iterable[str], engines: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in engines)


def _wrong(engine: ComparedWorker, wrong: _Rows) -> Iterator[Finding]:
    """Yield a finding per cause; rows without one are together by the word of their difference."""
    same: dict[tuple[Cause | Word, str, str], _Rows] = {}
    for tensor, row in wrong:
        found = _cause(row) or row.word or Word(row.status)
        same.setdefault((found, str(row.evidence.get(PLACES, "")), _rows_of(row)), []).append((tensor, row))
    for (cause, places, of_rows), rows in same.items():
        opening = f"{standard.FORWARD} · {engine.label} · {listed([t.tensor for t, _ in rows])}{of_rows}: "
        yield Finding(
            kind=str(cause),
            severity="error",
            message=opening + _sentence(cause, places, rows),
            general=f"{standard.FORWARD} · {engine.label}: {_sentence(cause, places, rows[:1])}",
            workers=(engine.label,),
            tensors=tuple(t.name for t, _ in rows),
            cause=_sentence(cause, places, rows) if isinstance(cause, Cause) else None,
            detail=tuple(line for t, row in rows for line in (describe(t, row), *_tried(row))),
            next="; or ".join(one.todo for one in _causes(rows[0][1])) or _again(engine, wrong),
            load_paths=(engine.load_path,),
        )


def _cause(row: Outcome) -> Cause | None:
    return next(iter(_causes(row)), None)


def _causes(row: Outcome) -> list[Cause]:
    """Return what explains a row, in the order of `Cause`: several where they come to the same here."""
    several = row.evidence.get(SEVERAL)
    named = [row.evidence.get(CAUSE), *(several if isinstance(several, list) else ())]
    return [cause for cause in Cause if cause in named]


def _rows_of(row: Outcome) -> str:
    """Return the rows of the batch that are wrong, where others are right."""
    rows = [str(number) for number in row.evidence.get(ROWS, ())]
    return f" in {'row' if len(rows) == 1 else 'rows'} {some(rows)}" if rows else ""


def _sentence(cause: Cause | Word, places: str, rows: _Rows) -> str:
    if isinstance(cause, Cause):
        others = [one.phrase.replace("{}", places) for one in _causes(rows[0][1]) if one != cause]
        return ", or ".join([cause.sentence(places), *others]) + (", which is the same here" if others else "")
    if cause == words.MISSING:
        return "; ".join(dict.fromkeys(row.reason or "missing" for _, row in rows))
    found = words.about(cause, OUTPUT, computed=True)
    worst = max((float(row.ratio) for _, row in rows if row.ratio is not None), default=math.nan)
    if not math.isfinite(worst):
        return found
    return (
        f"{found}, {worst:.3g} times as far from float64 as the rule allows; no mistake with an adapter that is known "
        "here explains it"
    )


def _tried(row: Outcome) -> Iterator[str]:
    """Yield further lines of evidence for the cause."""
    share = row.evidence.get("cause_bound_ratio")
    if share is not None:
        yield f"the explanation is within the rule: {float(share):.2g} of what is allowed"
    if left := row.evidence.get("not_tried"):
        yield f"not tried, for this model: {', '.join(map(str, left))}"


def _batches(engine: ComparedWorker, rows: _Rows) -> Iterator[Finding]:
    wrong = [(t, row) for t, row in rows if row.status in BAD]
    moved = [(t, row) for t, row in rows if not row.evidence.get("same_bits", True)]
    if wrong:
        reasons = list(dict.fromkeys(row.reason or "" for _, row in wrong))
        yield Finding(
            kind=BATCH_VARIANT,
            severity="error",
            message=f"{standard.FORWARD} · {engine.label} · {some(reasons, 2)}",
            general=f"{standard.FORWARD} · {engine.label} · the answer depends on the batch",
            workers=(engine.label,),
            tensors=tuple(t.name for t, _ in wrong),
            detail=tuple(reasons),
            load_paths=(engine.load_path,),
        )
    elif moved:
        largest = max(float(row.evidence["max_abs"]) for _, row in moved)
        opening = f"{standard.FORWARD} · {engine.label} · row 0 has other bits"
        yield Finding(
            kind=BATCH_VARIANT,
            severity="note",
            message=(
                f"{opening} in {len(moved)} of {len(rows)} batches than alone, by at most {largest:.3g}, which the "
                "rule allows; the engine promises no batch invariance"
            ),
            general=f"{opening} in some batches than alone",
            workers=(engine.label,),
            tensors=tuple(t.name for t, _ in moved),
            load_paths=(engine.load_path,),
        )


def _part(engine: ComparedWorker, rows: _Rows) -> Iterator[Finding]:
    """Report what of the outputs was not compared."""
    shown = next((row.evidence for t, row in rows if t.layer == OUTPUT and "places" in row.evidence), None)
    if shown is None:
        return
    parts = []
    if shown["places"] < shown["places_wanted"]:
        parts.append(f"{shown['places']} of {shown['places_wanted']} places")
    if "top_k" in shown:
        parts.append(f"the {shown['top_k']} largest of {shown['vocabulary']} values of each place")
    if parts:
        text = (
            f"{standard.FORWARD} · {engine.label} · compared in {' and '.join(parts)}: the engine's file has no others"
        )
        yield Finding(kind=PART_COMPARED, severity="note", message=text, workers=(engine.label,))


def _again(engine: ComparedWorker, wrong: _Rows) -> str | None:
    if any(t.tensor == ADAPTER_OFF and _cause(row) is None for t, row in wrong):
        return "look at the engine's base, its config and its dtype first: it is outside without the adapter too"
    case = engine.case
    path = next((one.path for one in case.engine_outputs if one.name == engine.info.name), None)
    if path is None:
        return None
    adapter = f" --adapter {shlex.quote(case.adapter)}" if case.adapter else ""
    inputs = f"consistency inputs --base {shlex.quote(case.base)}{adapter} --out inputs.safetensors"
    return f"{inputs}, and let the engine write {shlex.quote(path)} again"


ENGINES = Finder(name="engines", phase=Phase.CAUSES, position=2, find=find_engines, without_own=of_devices)
