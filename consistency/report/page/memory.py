"""Who the workers were, how they ended, and the memory they held from stage to stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from consistency.capture.records import StageMemory
from consistency.capture.wording import size
from consistency.comparison.result import Comparison, WorkerSummary
from consistency.report.text import one_line

MOST_WORKERS = 64
"""Lines of the table, those first that did not end well; a fleet's others are in `report.json`."""

_HELD = (("host", "host_resident_bytes", "host_peak_bytes"), ("device", "device_resident_bytes", "device_peak_bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Memory at the end of a stage and at its peak; shares are of the largest number of its kind."""

    kind: str
    text: str
    resident: float
    peak: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerText:
    """A worker's line."""

    name: str
    load_path: str
    device: str
    identity: str
    status: str
    reason: str
    seconds: str
    peak: str
    stages: tuple[tuple[Bar, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The table of workers; `stages` is empty where memory was not measured by stage."""

    stages: tuple[str, ...]
    lines: tuple[WorkerText, ...]
    left_out: int


def workers(comparison: Comparison) -> Workers:
    """Return the table of workers."""
    ranked = sorted(comparison.workers, key=lambda worker: worker.status == "ok")
    chosen = comparison.workers if len(ranked) <= MOST_WORKERS else ranked[:MOST_WORKERS]
    stages = tuple(dict.fromkeys(one_line(entry.stage) for worker in chosen for entry in worker.stage_memory))
    largest = {kind: max(_numbers(chosen, (resident, peak)), default=0) for kind, resident, peak in _HELD}
    return Workers(
        stages=stages,
        lines=tuple(_line(worker, stages, largest) for worker in chosen),
        left_out=len(ranked) - len(chosen),
    )


def _line(worker: WorkerSummary, stages: Sequence[str], largest: dict[str, int]) -> WorkerText:
    by_stage = {one_line(entry.stage): entry for entry in worker.stage_memory}
    identity = [worker.uuid, worker.pci_bus_id, f"driver {worker.driver}" if worker.driver else None]
    return WorkerText(
        name=one_line(worker.name),
        load_path=one_line(worker.load_path),
        device=one_line(f"{worker.architecture} · {worker.model}" if worker.model else worker.architecture),
        identity=one_line(" · ".join(text for text in identity if text)),
        status=one_line(worker.status),
        reason=one_line(worker.reason or ""),
        seconds=f"{worker.elapsed_s:.1f} s" if worker.elapsed_s else "",
        peak="" if worker.peak_bytes is None else size(worker.peak_bytes),
        stages=tuple(tuple(_bars(by_stage.get(stage), largest)) for stage in stages),
    )


def _bars(entry: StageMemory | None, largest: dict[str, int]) -> Iterable[Bar]:
    for kind, resident, peak in _HELD if entry is not None else ():
        held, most = getattr(entry, resident), getattr(entry, peak)
        whole = largest[kind]
        if (held is None and most is None) or not whole:
            continue
        text = " · ".join(part for part in (size(held), f"peak {size(most)}" if most is not None else "") if part)
        yield Bar(kind=kind, text=text, resident=(held or 0) / whole, peak=(most or held or 0) / whole)


def _numbers(chosen: Sequence[WorkerSummary], names: Sequence[str]) -> Iterable[int]:
    for worker in chosen:
        for entry in worker.stage_memory:
            for name in names:
                number = getattr(entry, name)
                if number is not None and number >= 0:
                    yield number
