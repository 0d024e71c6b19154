"""Environments side by side, differing settings first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consistency.comparison.result import WorkerSummary
from consistency.report.marks import letter

MOST_COLUMNS = 12
"""Distinct environments side by side: a screen's width."""

_ABSENT = "missing"

_IDENTITY = frozenset({"device_uuid", "variables.CUDA_VISIBLE_DEVICES"})
"""Identifies a device, so it would give each one a column; the table of workers has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Settings line by line; workers with the same environment share a column.

    Attributes
    ----------
    columns : list of list of str
        Names of workers.
    differing : list of tuple
        Name of a setting and, by column, letter and text; equal values of a line have equal letters.
    same : list of tuple of str
        Name of a setting and its only value.
    left_out : int
        Workers of environments for which there is no column.
    """

    columns: list[list[str]]
    differing: list[tuple[str, list[tuple[str, str]]]]
    same: list[tuple[str, str]]
    left_out: int


def environments(workers: Sequence[WorkerSummary]) -> Environments:
    """Compare the workers' environments, setting by setting."""
    equal: dict[tuple[tuple[str, str], ...], list[str]] = {}
    # of a fleet every host would be a column; the table of workers has their names
    left = {"host"} if len({worker.host for worker in workers}) > MOST_COLUMNS else set()
    for worker in workers:
        found = tuple((name, text) for name, text in flat(worker) if name not in left)
        equal.setdefault(found, []).append(worker.name)
    chosen = [(dict(items), names) for items, names in equal.items()][:MOST_COLUMNS]
    differing, same = [], []
    for name in dict.fromkeys(name for found, _ in chosen for name in found):
        texts = [found.get(name, _ABSENT) for found, _ in chosen]
        letters = {text: letter(number) for number, text in enumerate(dict.fromkeys(texts))}
        if len(letters) > 1:
            differing.append((name, [(letters[text], text) for text in texts]))
        else:
            same.append((name, texts[0]))
    return Environments(
        columns=[list(dict.fromkeys(names)) for _, names in chosen],
        differing=differing,
        same=same,
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
