"""Findings on the outputs of inference engines: the cause of wrong ones, and the part that was compared."""

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
    """Report wrong outputs of inference engines, by their cause, and the part of the outputs that was compared."""
    for engine in evidence.workers:
        if not engine.is_engine or engine.info.status != "ok":
            continue
        rows = list(_rows_of_engine(evidence, engine))
        outputs = [(tensor, row) for tensor, row in rows if tensor.layer == OUTPUT]
        yield from _wrong(engine, [(tensor, row) for tensor, row in outputs if row.status in BAD])
        yield from _batches(engine, [(tensor, row) for tensor, row in rows if tensor.layer == BATCHES])
        yield from _part_compared(engine, outputs)
        if outputs and all(row.status == "skipped" for _, row in outputs):
            yield Finding(
                kind=kinds.NOTHING_COMPARED,
                severity="error",
                message=f"forward · {engine.label} · nothing was compared of this engine: {_why_nothing(outputs)}",
                workers=(engine.label,),
                tensors=_names(outputs),
            )


def _rows_of_engine(evidence: ComparisonEvidence, engine: ComparedWorker) -> Iterator[tuple[TensorComparison, Outcome]]:
    for tensor in evidence.tensors:
        outcome = tensor.outcome(engine.label) if tensor.stage == standard.FORWARD else None
        if outcome is not None:
            yield tensor, outcome


def _names(rows: _Rows) -> tuple[str, ...]:
    return tuple(tensor.name for tensor, _ in rows)


def _why_nothing(outputs: _Rows) -> str:
    """Return why none of an engine's rows could be compared.

    Outputs that are not in the file are no reason by themselves: the engine may not have been asked for them.
    """
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
    tensors_of_devices = []
    for tensor in tensors:
        if not engines.intersection(tensor.workers):
            tensors_of_devices.append(tensor)
            continue
        outcomes = []
        for outcome in tensor.outcomes:
            devices = _without(outcome.workers, engines)
            if devices:
                outcomes.append(outcome.of(devices))
        if outcomes:
            classes = [_without(workers, engines) for workers in tensor.classes]
            of_devices = msgspec.structs.replace(
                tensor,
                outcomes=tuple(outcomes),
                classes=tuple(workers for workers in classes if workers),
                workers=_without(tensor.workers, engines),
            )
            tensors_of_devices.append(of_devices)
    return tensors_of_devices


def _without(workers: Iterable[str], engines: set[str]) -> tuple[str, ...]:
    return tuple(worker for worker in workers if worker not in engines)


def _wrong(engine: ComparedWorker, wrong: _Rows) -> Iterator[Finding]:
    """Yield a finding for each cause; rows without a cause are grouped by the word of their difference."""
    groups: dict[tuple[Cause | Word, str, str], _Rows] = {}
    for tensor, row in wrong:
        cause_or_word = _cause(row) or row.word or Word(row.status)
        key = (cause_or_word, str(row.evidence.get(PLACES, "")), _wrong_rows(row))
        groups.setdefault(key, []).append((tensor, row))
    for (cause, places, wrong_rows), rows in groups.items():
        modes = listed([tensor.tensor for tensor, _ in rows])
        opening = f"{standard.FORWARD} · {engine.label} · {modes}{wrong_rows}: "
        detail: list[str] = []
        for tensor, row in rows:
            detail += (describe(tensor, row), *_further_evidence(row))
        yield Finding(
            kind=str(cause),
            severity="error",
            message=opening + _sentence(cause, places, rows),
            general=f"{standard.FORWARD} · {engine.label}: {_sentence(cause, places, rows[:1])}",
            workers=(engine.label,),
            tensors=_names(rows),
            cause=_sentence(cause, places, rows) if isinstance(cause, Cause) else None,
            detail=tuple(detail),
            next="; or ".join(cause.todo for cause in _causes(rows[0][1])) or _next_step(engine, wrong),
            load_paths=(engine.load_path,),
        )


def _cause(row: Outcome) -> Cause | None:
    return next(iter(_causes(row)), None)


def _causes(row: Outcome) -> list[Cause]:
    """Return the causes that explain a row, in the order of `Cause`: several where they come to the same here."""
    values = [row.evidence.get(CAUSE)]
    several = row.evidence.get(SEVERAL)
    if isinstance(several, list):
        values += several
    return [cause for cause in Cause if cause in values]


def _wrong_rows(row: Outcome) -> str:
    """Return the rows of the batch that are wrong, in words; empty where all are."""
    numbers = [str(number) for number in row.evidence.get(ROWS, ())]
    if not numbers:
        return ""
    noun = "row" if len(numbers) == 1 else "rows"
    return f" in {noun} {some(numbers)}"


def _sentence(cause: Cause | Word, places: str, rows: _Rows) -> str:
    if isinstance(cause, Cause):
        other_phrases = [other.phrase.replace("{}", places) for other in _causes(rows[0][1]) if other != cause]
        if not other_phrases:
            return cause.sentence(places)
        return ", or ".join([cause.sentence(places), *other_phrases]) + ", which is the same here"
    if cause == words.MISSING:
        return "; ".join(dict.fromkeys(row.reason or "missing" for _, row in rows))
    sentence = words.about(cause, OUTPUT, computed=True)
    worst = max((float(row.ratio) for _, row in rows if row.ratio is not None), default=math.nan)
    if not math.isfinite(worst):
        return sentence
    return (
        f"{sentence}, {worst:.3g} times as far from float64 as the rule allows; no mistake with an adapter that is "
        "known here explains it"
    )


def _further_evidence(row: Outcome) -> Iterator[str]:
    """Yield lines on how well the cause fits, and on the causes that were not tried."""
    ratio = row.evidence.get("cause_bound_ratio")
    if ratio is not None:
        yield f"the explanation is within the rule: {float(ratio):.2g} of what is allowed"
    not_tried = row.evidence.get("not_tried")
    if not_tried:
        yield f"not tried, for this model: {', '.join(map(str, not_tried))}"


def _batches(engine: ComparedWorker, rows: _Rows) -> Iterator[Finding]:
    """Report that an answer depends on the batch: an error, or a note where the rule allows the difference."""
    wrong = [(tensor, row) for tensor, row in rows if row.status in BAD]
    moved = [(tensor, row) for tensor, row in rows if not row.evidence.get("same_bits", True)]
    if wrong:
        reasons = list(dict.fromkeys(row.reason or "" for _, row in wrong))
        yield Finding(
            kind=BATCH_VARIANT,
            severity="error",
            message=f"{standard.FORWARD} · {engine.label} · {some(reasons, 2)}",
            general=f"{standard.FORWARD} · {engine.label} · the answer depends on the batch",
            workers=(engine.label,),
            tensors=_names(wrong),
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
            tensors=_names(moved),
            load_paths=(engine.load_path,),
        )


def _part_compared(engine: ComparedWorker, outputs: _Rows) -> Iterator[Finding]:
    """Report the part of the outputs that was compared, where the engine's file has no others."""
    coverage = next((row.evidence for _, row in outputs if "places" in row.evidence), None)
    if coverage is None:
        return
    parts = []
    if coverage["places"] < coverage["places_wanted"]:
        parts.append(f"{coverage['places']} of {coverage['places_wanted']} places")
    if "top_k" in coverage:
        parts.append(f"the {coverage['top_k']} largest of {coverage['vocabulary']} values of each place")
    if parts:
        text = (
            f"{standard.FORWARD} · {engine.label} · compared in {' and '.join(parts)}: the engine's file has no others"
        )
        yield Finding(kind=PART_COMPARED, severity="note", message=text, workers=(engine.label,))


def _next_step(engine: ComparedWorker, wrong: _Rows) -> str | None:
    """Return what to do about rows without a cause; None where the engine's file is not named in the case."""
    if any(tensor.tensor == ADAPTER_OFF and _cause(row) is None for tensor, row in wrong):
        return "look at the engine's base, its config and its dtype first: it is outside without the adapter too"
    case = engine.case
    path = next((file.path for file in case.engine_outputs if file.name == engine.info.name), None)
    if path is None:
        return None
    adapter = f" --adapter {shlex.quote(case.adapter)}" if case.adapter else ""
    inputs = f"consistency inputs --base {shlex.quote(case.base)}{adapter} --out inputs.safetensors"
    return f"{inputs}, and let the engine write {shlex.quote(path)} again"


ENGINES = Finder(name="engines", phase=Phase.CAUSES, position=2, find=find_engines, without_own=of_devices)
