"""User tolerances: where each was applied, and which of them judged nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from consistency.capture.wording import counted
from consistency.case.tolerance import Override
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.outcomes import group_by_key
from consistency.comparison.records import StageTable, tables_of
from consistency.comparison.result import Finding, tensor_name
from consistency.comparison.workers import ComparedWorker, labels_of
from consistency.numerics.rules import Rule


def find_tolerances(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report how many tensors each tolerance judged, and captures with different tolerances."""
    compared = evidence.workers
    yield from _different_tolerances(compared)
    yield from _applied(compared)
    overrides = dict.fromkeys(itertools.chain.from_iterable(worker.case.tolerance for worker in compared))
    for override in overrides:
        yield from _idle(override, [worker for worker in compared if override in worker.case.tolerance])


def _applied(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Report for each tolerance the tensors that it judged."""
    tensors_by_tolerance: dict[str, dict[str, None]] = {}
    tolerances_by_table: dict[StageTable, set[str]] = {}
    # each table once: the workers of a fleet share them
    for table in tables_of(worker.records for worker in compared):
        tolerances = tolerances_by_table[table] = set()
        for key, record in table.items():
            if record.rule == Rule.USER:
                tolerance = record.tolerance or "not named"
                tolerances.add(tolerance)
                tensors_by_tolerance.setdefault(tolerance, {})[tensor_name(*key)] = None
    workers_by_tolerance: dict[str, dict[str, None]] = {}
    for worker in compared:
        for table in worker.records.stages.values():
            for tolerance in tolerances_by_table[table]:
                workers_by_tolerance.setdefault(tolerance, {})[worker.label] = None
    for tolerance, names in tensors_by_tolerance.items():
        yield Finding(
            kind=kinds.TOLERANCE,
            severity="note",
            message=f"tolerance {tolerance}: {counted(len(names), 'tensor')} judged by it instead of the derived bound",
            general=f"tolerance {tolerance}: tensors judged by it instead of the derived bound",
            workers=tuple(workers_by_tolerance[tolerance]),
            tensors=tuple(names),
        )


def _idle(override: Override, compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Report a tolerance that judged nothing, so that a misspelt pattern is seen; a lost worker proves nothing.

    Parameters
    ----------
    compared : sequence of ComparedWorker
        Workers whose case has the tolerance.
    """
    if not any(worker.info.status == "ok" for worker in compared):
        return
    concerned = [worker for worker in compared if override.is_for(worker.info.architecture)]
    rules: dict[str, str] = {}  # of the tensors that the pattern matches, by name
    for table in tables_of(worker.records for worker in concerned):
        for key, record in table.items():
            if override.matches(stage=record.stage, layer=record.layer, dtype=record.dtype):
                # it judged a tensor, so there is nothing to report
                if record.tolerance == str(override):
                    return
                rules[tensor_name(*key)] = record.rule
    if not concerned:
        names = ", ".join(dict.fromkeys(worker.info.architecture for worker in compared))
        reason = f"matched no architecture that was checked: {names}"
    elif not rules:
        reason = "matched no tensor that was checked"
    elif Rule.USER in rules.values():
        reason = f"judged no tensor: a later one wins where it matches ({counted(len(rules), 'tensor')})"
    else:
        reason = f"judged no tensor: no float64 value is known where it matches ({counted(len(rules), 'tensor')})"
    yield Finding(
        kind=kinds.TOLERANCE,
        severity="note",
        message=f"tolerance {override}: {reason}",
        workers=labels_of(compared),
        tensors=tuple(rules),
    )


def _different_tolerances(compared: Sequence[ComparedWorker]) -> Iterator[Finding]:
    """Report captures made with different tolerances: every row is judged by its own capture's."""
    labels_by_tolerances = group_by_key((worker.case.tolerance, worker.label) for worker in compared)
    if len(labels_by_tolerances) < 2:
        return
    descriptions = []
    for tolerances, labels in labels_by_tolerances.items():
        names = " and ".join(map(str, tolerances)) or "none"
        descriptions.append(f"{', '.join(dict.fromkeys(labels))}: {names}")
    yield Finding(
        kind=kinds.TOLERANCE,
        severity="note",
        message="the captures were made with different tolerances, and each row is judged by its own: "
        + "; ".join(descriptions),
        workers=labels_of(compared),
    )


FINDERS = (Finder(name="tolerances", phase=Phase.REMARKS, position=1, find=find_tolerances),)
