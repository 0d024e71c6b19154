"""Environments side by side, what differs first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consistency.capture.wording import shortened
from consistency.comparison.result import WorkerSummary
from consistency.report.page.labels import letter
from consistency.report.text import one_line

MOST_COLUMNS = 12
"""Distinct environments side by side: a screen's width."""

_ABSENT = "not there"

_IDENTITY = frozenset({"device_uuid", "variables.CUDA_VISIBLE_DEVICES"})
"""What names a device differs on each of them by design, and would give each a column; the table of workers has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What an environment says of a setting; equal values of a line have equal letters."""

    text: str
    letter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One setting in all environments; `letter` is empty where all say the same."""

    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Workers with the same environment share a column.

    Attributes
    ----------
    columns : tuple of tuple of str
        Names of workers.
    same : tuple of Line
        With one value each.
    left_out : int
        Workers of environments for which there is no column.
    """

    columns: tuple[tuple[str, ...], ...]
    differing: tuple[Line, ...]
    same: tuple[Line, ...]
    left_out: int


def environments(workers: Sequence[WorkerSummary]) -> Environments:
    """Line the workers' environments up, setting by setting."""
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for worker in workers:
        alike.setdefault(tuple(flat(worker)), []).append(worker.name)
    chosen = [(dict(found), names) for found, names in alike.items()][:MOST_COLUMNS]
    differing, same = [], []
    for name in dict.fromkeys(name for found, _ in chosen for name in found):
        texts = [found.get(name, _ABSENT) for found, _ in chosen]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        if len(numbers) > 1:
            values = tuple(Value(text=one_line(text), letter=letter(numbers[text])) for text in texts)
            differing.append(Line(name=one_line(name), values=values))
        else:
            same.append(Line(name=one_line(name), values=(Value(text=one_line(texts[0]), letter=""),)))
    return Environments(
        columns=tuple(tuple(map(one_line, shortened(list(dict.fromkeys(names))))) for _, names in chosen),
        differing=tuple(differing),
        same=tuple(same),
        left_out=len(workers) - sum(len(names) for _, names in chosen),
    )


def flat(worker: WorkerSummary) -> Iterator[tuple[str, str]]:
    """Yield a worker's environment and the settings in force, nested tables as `variables.NAME`."""
    yield "host", worker.host
    yield "driver", worker.driver or "none"
    yield from ((name, text) for name, text in _flat("", worker.environment) if name not in _IDENTITY)
    for name, value in worker.in_force.items():
        asked = worker.asked.get(name, value)
        yield f"in force: {name}", _text(value) + ("" if asked == value else f" (asked for: {_text(asked)})")


def _flat(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", _text(value)


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
