"""The table of workers: identity, how they ended, and memory held stage by stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from consistency.capture.records import StageMemory
from consistency.capture.wording import size
from consistency.comparison.result import Comparison, WorkerSummary

MOST_OPEN = 12
"""Lines of the table before a reader unfolds the rest: half a screen."""

MOST_WORKERS = 64
"""Lines of the table, failed and lost ones first; the others of a fleet are in `report.json`."""

_HELD = (("host", "host_resident_bytes", "host_peak_bytes"), ("device", "device_resident_bytes", "device_peak_bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Memory at the end of a stage and at its peak; shares are of the largest number of its kind."""

    kind: str
    text: str
    resident: float
    peak: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The table of workers, each with its bars by stage; `stages` is empty where memory was not measured by stage.

    All but the first `open` lines are folded; where there are such, faulty workers come first.
    """

    open: int
    stages: tuple[str, ...]
    lines: tuple[tuple[WorkerSummary, list[list[Bar]]], ...]
    left_out: int


def workers(comparison: Comparison) -> Workers:
    """Return the table of workers."""
    named = {name for finding in comparison.findings if finding.severity == "error" for name in finding.workers}
    ranked = sorted(comparison.workers, key=lambda worker: (worker.status == "ok", worker.name not in named))
    chosen = comparison.workers if len(ranked) <= MOST_OPEN else ranked[:MOST_WORKERS]
    stages = tuple(dict.fromkeys(entry.stage for worker in chosen for entry in worker.stage_memory))
    largest = {kind: max(_numbers(chosen, (resident, peak)), default=0) for kind, resident, peak in _HELD}
    return Workers(
        open=MOST_OPEN,
        stages=stages,
        lines=tuple((worker, _held(worker, stages, largest)) for worker in chosen),
        left_out=len(ranked) - len(chosen),
    )


def _held(worker: WorkerSummary, stages: Sequence[str], largest: dict[str, int]) -> list[list[Bar]]:
    by_stage = {entry.stage: entry for entry in worker.stage_memory}
    return [list(_bars(by_stage.get(stage), largest)) for stage in stages]


def _bars(entry: StageMemory | None, largest: dict[str, int]) -> Iterable[Bar]:
    for kind, resident, peak in _HELD if entry is not None else ():
        held, most = getattr(entry, resident), getattr(entry, peak)
        whole = largest[kind]
        if (held is None and most is None) or not whole:
            continue
        parts = ("" if held is None else size(held), "" if most is None else f"peak {size(most)}")
        text = " · ".join(part for part in parts if part)
        yield Bar(kind=kind, text=text, resident=(held or 0) / whole, peak=(most or held or 0) / whole)


def _numbers(chosen: Sequence[WorkerSummary], names: Sequence[str]) -> Iterable[int]:
    numbers = (getattr(entry, name) for worker in chosen for entry in worker.stage_memory for name in names)
    return (number for number in numbers if number is not None and number >= 0)
