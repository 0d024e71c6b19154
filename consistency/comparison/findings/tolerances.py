"""What the report says of the user's own tolerances: where each was in force, and which of them judged nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from consistency.capture.names import TOLERANCE
from consistency.case.tolerance import Override
from consistency.comparison.result import Finding, tensor_name
from consistency.comparison.workers import Participant
from consistency.numerics.rules import Rule

KIND = "tolerance"


def find_tolerances(participants: Sequence[Participant]) -> Iterable[Finding]:
    """Say of every tolerance how many tensors it judged, of which none, and where captures had others."""
    yield from _others(participants)
    yield from _applied(participants)
    for override in dict.fromkeys(o for p in participants for o in p.case.tolerance):
        yield from _idle(override, [p for p in participants if override in p.case.tolerance])


def _applied(participants: Sequence[Participant]) -> Iterable[Finding]:
    judged: dict[str, dict[str, None]] = {}
    workers: dict[str, dict[str, None]] = {}
    for p in participants:
        for key, record in p.records.items():
            if record.rule == Rule.USER:
                text = str(record.evidence.get(TOLERANCE, "not named"))
                judged.setdefault(text, {})[tensor_name(*key)] = None
                workers.setdefault(text, {})[p.label] = None
    for text, names in judged.items():
        yield Finding(
            kind=KIND,
            severity="note",
            message=f"tolerance {text}: {_count(len(names))} judged by it instead of the tool's own rule",
            workers=tuple(workers[text]),
            tensors=tuple(names),
        )


def _idle(override: Override, participants: Sequence[Participant]) -> Iterable[Finding]:
    """Say where a tolerance judged nothing, so that a misspelt pattern is seen; a lost worker's silence is no sign."""
    if not any(p.info.status == "ok" for p in participants):
        return
    matched: dict[str, str] = {}
    for p in participants:
        for key, record in p.records.items():
            if override.matches(stage=record.stage, layer=record.layer, dtype=record.dtype):
                if record.evidence.get(TOLERANCE) == str(override):
                    return
                matched[tensor_name(*key)] = record.rule
    if not matched:
        why = "matched no tensor of what was looked at"
    elif Rule.USER in matched.values():
        why = f"judged no tensor: a later one wins where it matches ({_count(len(matched))})"
    else:
        why = f"judged no tensor: no float64 value is known where it matches ({_count(len(matched))})"
    yield Finding(
        kind=KIND,
        severity="note",
        message=f"tolerance {override}: {why}",
        workers=tuple(dict.fromkeys(p.label for p in participants)),
        tensors=tuple(matched),
    )


def _others(participants: Sequence[Participant]) -> Iterable[Finding]:
    """Say where captures were made with different tolerances: every row is judged by its own capture's."""
    by_given: dict[tuple[Override, ...], list[str]] = {}
    for p in participants:
        by_given.setdefault(p.case.tolerance, []).append(p.label)
    if len(by_given) > 1:
        text = "; ".join(
            f"{', '.join(dict.fromkeys(labels))}: {' and '.join(map(str, given)) or 'none'}"
            for given, labels in by_given.items()
        )
        yield Finding(
            kind=KIND,
            severity="note",
            message=f"the captures were made with different tolerances, and each row is judged by its own: {text}",
            workers=tuple(dict.fromkeys(p.label for p in participants)),
        )


def _count(number: int) -> str:
    return f"{number} tensor" if number == 1 else f"{number} tensors"
