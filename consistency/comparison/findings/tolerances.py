"""User tolerances: where each was applied, and which of them judged nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from consistency.capture.wording import counted
from consistency.case.tolerance import Override
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.outcomes import gathered
from consistency.comparison.records import StageTable, tables_of
from consistency.comparison.result import Finding, tensor_name
from consistency.comparison.workers import ComparedWorker
from consistency.numerics.rules import Rule


def find_tolerances(evidence: ComparisonEvidence) -> Iterable[Finding]:
    """Report how many tensors each tolerance judged, and captures with different tolerances."""
    compared = evidence.workers
    yield from _others(compared)
    yield from _applied(compared)
    for override in dict.fromkeys(o for p in compared for o in p.case.tolerance):
        yield from _idle(override, [p for p in compared if override in p.case.tolerance])


def _applied(compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    judged: dict[str, dict[str, None]] = {}
    workers: dict[str, dict[str, None]] = {}
    by_table: dict[StageTable, set[str]] = {}
    for table in tables_of(p.records for p in compared):
        texts = by_table[table] = set()
        for key, record in table.items():
            if record.rule == Rule.USER:
                texts.add(text := record.tolerance or "not named")
                judged.setdefault(text, {})[tensor_name(*key)] = None
    for p in compared:
        for text in {text for table in p.records.stages.values() for text in by_table[table]}:
            workers.setdefault(text, {})[p.label] = None
    for text, names in judged.items():
        yield Finding(
            kind=kinds.TOLERANCE,
            severity="note",
            message=f"tolerance {text}: {counted(len(names), 'tensor')} judged by it instead of the derived bound",
            general=f"tolerance {text}: tensors judged by it instead of the derived bound",
            workers=tuple(workers[text]),
            tensors=tuple(names),
        )


def _idle(override: Override, compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    """Report a tolerance that judged nothing, so that a misspelt pattern is seen; a lost worker proves nothing."""
    if not any(p.info.status == "ok" for p in compared):
        return
    matched: dict[str, str] = {}
    there = [p for p in compared if override.is_for(p.info.architecture)]
    for table in tables_of(p.records for p in there):
        for key, record in table.items():
            if override.matches(stage=record.stage, layer=record.layer, dtype=record.dtype):
                if record.tolerance == str(override):
                    return
                matched[tensor_name(*key)] = record.rule
    if not there:
        names = ", ".join(dict.fromkeys(p.info.architecture for p in compared))
        why = f"matched no architecture that was checked: {names}"
    elif not matched:
        why = "matched no tensor that was checked"
    elif Rule.USER in matched.values():
        why = f"judged no tensor: a later one wins where it matches ({counted(len(matched), 'tensor')})"
    else:
        why = f"judged no tensor: no float64 value is known where it matches ({counted(len(matched), 'tensor')})"
    yield Finding(
        kind=kinds.TOLERANCE,
        severity="note",
        message=f"tolerance {override}: {why}",
        workers=tuple(dict.fromkeys(p.label for p in compared)),
        tensors=tuple(matched),
    )


def _others(compared: Sequence[ComparedWorker]) -> Iterable[Finding]:
    """Report captures made with different tolerances: every row is judged by those of its own capture."""
    by_tolerance = gathered((p.case.tolerance, p.label) for p in compared)
    if len(by_tolerance) > 1:
        text = "; ".join(
            f"{', '.join(dict.fromkeys(labels))}: {' and '.join(map(str, tolerance)) or 'none'}"
            for tolerance, labels in by_tolerance.items()
        )
        yield Finding(
            kind=kinds.TOLERANCE,
            severity="note",
            message=f"the captures were made with different tolerances, and each row is judged by its own: {text}",
            workers=tuple(dict.fromkeys(p.label for p in compared)),
        )


FINDERS = (Finder(name="tolerances", phase=Phase.REMARKS, position=1, find=find_tolerances),)
