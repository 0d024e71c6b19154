"""A history as a table: one row per device, one column per night, and a class of bits and a verdict in each cell."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from consistency.comparison.by_worker import worse
from consistency.comparison.history.records import RunRecord
from consistency.comparison.history.run_workers import WorkerRecord
from consistency.report.marks import letter

_NIGHT = datetime.timedelta(hours=12)
"""Runs of several hosts, or of several cases of one host, are of the same night where they began within this time."""

_WORST_FIRST = ("incomplete", "inconsistent", "unchecked", "consistent")

Key = tuple[str, ...]
"""Case, load path, inputs and stage: results with the same key are comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """Runs that share a column, the earliest first."""

    runs: tuple[RunRecord, ...]

    @property
    def verdict(self) -> str:
        return self.worst.verdict

    @property
    def worst(self) -> RunRecord:
        """Return a run with the worst verdict: where several have it, one with a finding."""
        return min(self.runs, key=lambda run: (_place(run.verdict), not run.findings))

    @property
    def began(self) -> str:
        return self.runs[0].at[:16].replace("T", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One device in one night, over its load paths and cases.

    Attributes
    ----------
    run : RunRecord
        The run with this verdict.
    group : int or None
        Class of bits: results with the same number are bitwise equal, where both were checked. None without any.
    change : str
        What is not as in the run before: software, inputs.
    """

    run: RunRecord
    verdict: str
    group: int | None
    ratio: float | None
    drift: tuple[str, ...]
    change: str

    @property
    def letter(self) -> str:
        return "–" if self.group is None else letter(self.group)

    @property
    def said(self) -> str:
        """Return the cell in words."""
        parts = [f"{self.run.at[:16].replace('T', ' ')}: {self.verdict}", f"bits {self.letter}"]
        parts = parts if self.group is not None else parts[:1]
        parts += [f"drift in {', '.join(self.drift)}"] if self.drift else []
        parts += [f"error/tolerance {self.ratio:.2f}"] if self.ratio is not None else []
        return ", ".join([*parts, *([self.change] if self.change else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The worst error/tolerance from night to night, in units of the drawing: `WIDTH` per night, `HEIGHT` in all.

    Attributes
    ----------
    lines : tuple of str
        Points of a line each; a night without a number is a gap.
    dots : tuple of tuple of float
        Nights with a number between gaps, and the last one.
    beyond : tuple of float
        Where it is NaN, or larger than what is drawn.
    limit : float or None
        Where the tolerance is, if it is in the drawing.
    """

    width: float
    lines: tuple[str, ...]
    dots: tuple[tuple[float, float], ...]
    beyond: tuple[float, ...]
    limit: float | None
    last: float | None
    largest: float | None

    WIDTH = 10.0
    HEIGHT = 28.0
    MARGIN = 4.0
    LARGEST = 2.0  # twice the tolerance: a flipped exponent bit makes it 1e30, beside which all others would be 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One device from night to night; None in nights without it.

    Attributes
    ----------
    count : int
        Devices that the line stands for, which were alike in every run; their `names` where they are several.
    """

    device: str
    latest: WorkerRecord
    host: str
    cells: tuple[Cell | None, ...]
    trend: Trend
    count: int = 1
    names: str = ""


@dataclass(slots=True)
class _Known:
    """What was seen of a device so far: its classes of bits, and the software and inputs of its last run."""

    groups: list[dict[Key, str]] = field(default_factory=list)
    software: Mapping[Key, str] = field(default_factory=dict)
    inputs: Mapping[Key, str] = field(default_factory=dict)

    def group(self, bits: Mapping[Key, str]) -> int:
        """Return the class of a result: the first that agrees with it in everything that both have."""
        for number, known in enumerate(self.groups):
            common = known.keys() & bits.keys()
            if common and all(known[key] == bits[key] for key in common):
                known.update(bits)
                return number
        self.groups.append(dict(bits))
        return len(self.groups) - 1


def nights(runs: Iterable[RunRecord], most: int) -> list[Night]:
    """Gather runs, given from the latest on, into nights, the earliest first; no more than `most`, 0 for all."""
    found: list[list[RunRecord]] = []
    for run in runs:
        if found and _is_same_night(run, found[-1]):
            found[-1].append(run)
        elif most and len(found) == most:
            break
        else:
            found.append([run])
    return [Night(runs=tuple(reversed(those))) for those in reversed(found)]


def lines(found: Sequence[Night], devices: Collection[str] | None = None, case: str | None = None) -> list[Line]:
    """Return one line for each of some devices (identities or names; None: all): the worst in their last run first."""
    cells: dict[str, dict[int, Cell]] = {}
    latest: dict[str, tuple[WorkerRecord, str]] = {}
    known: dict[str, _Known] = {}
    for number, night in enumerate(found):
        of: dict[str, list[tuple[RunRecord, WorkerRecord]]] = {}
        for run in night.runs:
            for worker in run.workers.select(devices):
                if case in (None, worker.case or run.case):
                    of.setdefault(worker.device, []).append((run, worker))
        for name, those in of.items():
            cells.setdefault(name, {})[number] = _cell(those, known.setdefault(name, _Known()))
            run, worker = those[-1]
            latest[name] = worker, worker.host or run.host
    made = [
        Line(
            device=name, latest=latest[name][0], host=latest[name][1],
            cells=tuple(of.get(number) for number in range(len(found))),
            trend=trend([cell.ratio if (cell := of.get(number)) else None for number in range(len(found))]),
        )
        for name, of in cells.items()
    ]  # fmt: skip
    return sorted(made, key=lambda line: (worst_first(line), line.host))


def worst_first(line: Line) -> int:
    """Return the place of a line among others: those that are worse in their last run come first."""
    return _place(next(cell for cell in reversed(line.cells) if cell).verdict)


def trend(ratios: Sequence[float | None]) -> Trend:
    """Draw ratios from 0 to the largest of them; the last point is on the right."""

    def fits(ratio: float | None) -> bool:
        return ratio is not None and ratio <= Trend.LARGEST  # NaN does not

    known = [ratio for ratio in ratios if ratio is not None]
    top = max(known, default=0.0) if all(map(fits, known)) else Trend.LARGEST
    top = top or 1.0  # all are 0
    room = Trend.HEIGHT - 2 * Trend.MARGIN

    def y(ratio: float) -> float:
        return round(Trend.HEIGHT - Trend.MARGIN - room * ratio / top, 2)

    places = [((number + 0.5) * Trend.WIDTH, ratio) for number, ratio in enumerate(ratios)]
    drawn, dots = [], []
    for is_drawn, group in itertools.groupby(places, key=lambda place: fits(place[1])):
        points = [(x, y(ratio)) for x, ratio in group if ratio is not None] if is_drawn else []
        if len(points) > 1:
            drawn.append(" ".join(f"{x:g},{y:g}" for x, y in points))
        dots += points if len(points) == 1 else points[-1:]
    largest: float | None = None
    for ratio in known:
        largest = worse(ratio, largest)
    return Trend(
        width=len(ratios) * Trend.WIDTH,
        lines=tuple(drawn),
        dots=tuple(dots),
        beyond=tuple(x for x, ratio in places if ratio is not None and not fits(ratio)),
        limit=y(1.0) if top >= 1.0 and drawn + dots else None,
        last=known[-1] if known else None,
        largest=largest,
    )


def _is_same_night(earlier: RunRecord, night: Sequence[RunRecord]) -> bool:
    first, latest = earlier.time, night[0].time
    others = {(run.host, run.case) for run in night}
    return (earlier.host, earlier.case) not in others and latest - first <= _NIGHT


def _cell(found: Sequence[tuple[RunRecord, WorkerRecord]], known: _Known) -> Cell:
    workers: dict[Key, WorkerRecord]
    workers = {(worker.case or run.case, worker.load_path): worker for run, worker in found}
    bits: dict[Key, str]
    whole = {key: worker for key, worker in workers.items() if worker.bits and worker.status == "ok"}
    bits = {(*key, w.inputs, stage): digest for key, w in whole.items() for stage, digest in w.bits.items()}
    software = {key: worker.software for key, worker in whole.items()}
    inputs = {key: worker.inputs for key, worker in whole.items()}
    changes = [
        f"other {what}"
        for what, now, then in (("software", software, known.software), ("inputs", inputs, known.inputs))
        if any(then.get(key, value) != value for key, value in now.items())
    ]
    known.software, known.inputs = {**known.software, **software}, {**known.inputs, **inputs}
    ratio: float | None = None
    for worker in workers.values():
        ratio = ratio if worker.ratio is None else worse(float(worker.ratio), ratio)
    run, worker = min(found, key=lambda one: _place(one[1].verdict))
    return Cell(
        run=run,
        verdict=worker.verdict,
        group=known.group(bits) if bits else None,
        ratio=ratio,
        drift=tuple(dict.fromkeys(stage for worker in workers.values() for stage in worker.drift)),
        change=" and ".join(changes),
    )


def _place(verdict: str) -> int:
    return _WORST_FIRST.index(verdict) if verdict in _WORST_FIRST else _WORST_FIRST.index("unchecked")
