"""A history as a page: one file that opens from disk, has no script, and links to the reports that are on this host.

Names may come from strangers, as in `report.html`: the template escapes every value, and a content security policy
allows no script and no request.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import urllib.parse
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jinja2
from markupsafe import Markup

from consistency.capture.version import __version__
from consistency.capture.wording import counted, some
from consistency.comparison.by_worker import worse
from consistency.comparison.kinds import WORST_FIRST
from consistency.comparison.outcomes import gathered
from consistency.errors import UsageError
from consistency.extras.operations.history.changes import changes
from consistency.extras.operations.history.records import MOST_APART, RunRecord, WorkerRecord
from consistency.extras.operations.history.store import History
from consistency.extras.operations.history.table import ChangeRow
from consistency.report.marks import VERDICT_MARKS, letter
from consistency.report.page.rendering import page_environment, part
from consistency.report.ranges import patterns

_PAGES = ("report.html", "suite.html")
_MOST_FINDINGS = 5  # of a run; its report has all
_MOST_CHANGES = 50  # the latest; `consistency history --changes` prints all
_CLASSES = 7  # colours of the style sheet


def history_as_html(
    history: History, last: int, *, place: Path, device: str | None = None, case: str | None = None
) -> str:
    """Return the page of the last runs; links to reports are relative to `place`, the page's own folder.

    Raises
    ------
    UsageError
        No run has this device or this case.
    """
    found = nights(history.runs(), last)
    runs = [run for night in found for run in night.runs]
    classes = class_lines(found, device, case)
    if not classes.lines and (device or case):
        devices = sorted(set().union(*(run.workers.devices for run in runs)))
        got = ", ".join(name for name in (device, case) if name)
        raise UsageError("no run has this device or this case", got=got, wanted=f"one of the devices {some(devices)}")
    since = [] if device or case else changes(runs)
    return _template().render(
        damage=history.damage,
        changes=[ChangeRow.of(change) for change in since[:_MOST_CHANGES]],
        changes_left_out=len(since[_MOST_CHANGES:]),
        devices=classes.lines,
        facts=_facts(found, runs, classes.devices),
        left_out=classes.left_out,
        failed=[run for run in reversed(runs) if run.findings],
        marks=VERDICT_MARKS,
        most_findings=_MOST_FINDINGS,
        name=history.url,
        nights=found,
        place=place,
        planted=[run.at[:16].replace("T", " ") for run in runs if run.planted],
        simulated=any(run.workers.is_simulated for run in runs),
        style=Markup(part("style.css") + part("history.css", __package__)),
        tool=__version__,
        trend=Trend,
        verdict=found[-1].verdict if found else None,
    )


@functools.cache
def _template() -> jinja2.Template:
    """Return the page's template, compiled once per process."""
    environment = page_environment()
    environment.filters.update(link=_link, night_link=_night_link)
    environment.filters["colour"] = lambda group: "none" if group is None else group % _CLASSES
    return environment.from_string(part("history.html", __package__))


def _facts(found: list[Night], runs: list[RunRecord], devices: int) -> list[str]:
    hosts = {host or run.host for run in runs for host in run.workers.hosts}
    facts = [counted(len(runs), "run"), counted(devices, "device"), counted(len(hosts), "host")]
    return [*facts, f"{found[0].began} to {found[-1].began} UTC"] if found else facts


def _night_link(night: Night, place: Path) -> str | None:
    """Return the link of a run with the worst verdict, if one of them has its report here."""
    links = (_link(run, place) for run in night.runs if run.verdict == night.verdict)
    return next((link for link in links if link is not None), None)


def _link(run: RunRecord, place: Path) -> str | None:
    """Return the link to a run's report, where it is on this host."""
    page = next((Path(run.report, name) for name in _PAGES if run.report and Path(run.report, name).is_file()), None)
    return None if page is None else urllib.parse.quote(os.path.relpath(page, place.resolve()))


_NIGHT = datetime.timedelta(hours=12)
"""Runs of several hosts, or of several cases of one host, are of the same night where they began within this time."""


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
    """One device in one night, over its load paths and cases."""

    run: RunRecord  # the run with this verdict
    verdict: str
    # class of bits: results with the same number are bitwise equal, where both were checked. None without any.
    group: int | None
    ratio: float | None
    drift: tuple[str, ...]
    change: str  # what is not as in the run before: software, inputs

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
    """The worst error/tolerance from night to night, in units of the drawing: `WIDTH` per night, `HEIGHT` in all."""

    width: float
    lines: tuple[str, ...]  # points of a line each; a night without a number is a gap
    dots: tuple[tuple[float, float], ...]  # nights with a number between gaps, and the last one
    beyond: tuple[float, ...]  # where it is NaN, or larger than what is drawn
    limit: float | None  # where the tolerance is, if it is in the drawing
    last: float | None
    largest: float | None

    WIDTH = 10.0
    HEIGHT = 28.0
    MARGIN = 4.0
    LARGEST = 2.0  # twice the tolerance: a flipped exponent bit makes it 1e30, beside which all others would be 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One device from night to night; None in nights without it."""

    device: str
    latest: WorkerRecord
    host: str
    cells: tuple[Cell | None, ...]
    trend: Trend
    # devices that the line stands for, which were alike in every run; their `names` where they are several
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
            device=name,
            latest=latest[name][0],
            host=latest[name][1],
            cells=tuple(of.get(number) for number in range(len(found))),
            trend=trend([cell.ratio if (cell := of.get(number)) else None for number in range(len(found))]),
        )
        for name, of in cells.items()
    ]
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
    return [*WORST_FIRST].index(verdict if verdict in WORST_FIRST else "unchecked")


MOST_CLASSES = 32
"""Rows of the page: a screen or two."""

MOST_ODD = 24
"""Of these rows, for devices that are not consistent: the largest others have the rest."""

_MOST_PATTERNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """The rows of a page, what they leave out, and the number of all devices."""

    lines: list[Line]
    left_out: str
    devices: int


def class_lines(found: Sequence[Night], device: str | None = None, case: str | None = None) -> Classes:
    """Return a row for each class of devices, or for each device where they are few, or one is asked for."""
    if device is not None:
        rows = lines(found, {device}, case)
        return Classes(lines=rows, left_out="", devices=len(rows))
    runs = [run for night in found for run in night.runs]
    names: dict[str, str] = {}
    seen: dict[str, list[tuple[int, str, str, bytes]]] = {}  # by device: run, load path, case, and what was seen
    bad: set[str] = set()  # not consistent in the last run
    for number, run in enumerate(runs):
        states = [one.state for one in run.workers.seen]
        for name, of, _, place in run.workers.rows:
            worker = run.workers.seen[place]
            if case in (None, worker.case or run.case):
                names[of] = name
                seen.setdefault(of, []).append((number, worker.load_path, worker.case, states[place]))
                if run is runs[-1] and (worker.status != "ok" or worker.verdict == "inconsistent"):
                    bad.add(of)
    if len(names) <= MOST_APART:
        return Classes(lines=lines(found, None, case), left_out="", devices=len(names))
    classes = gathered((tuple(sorted(what)), of) for of, what in seen.items())

    def is_odd(devices: Sequence[str]) -> bool:
        return devices[0] in bad or seen[devices[0]][-1][0] < len(runs) - 1

    odd = sorted((devices for devices in classes.values() if is_odd(devices)), key=len)
    others = sorted((devices for devices in classes.values() if not is_odd(devices)), key=len, reverse=True)
    room = MOST_CLASSES - len(odd[:MOST_ODD])
    first = {devices[0]: devices for devices in (*odd[:MOST_ODD], *others[:room])}
    rows = [
        replace(line, count=len(same), names=some(patterns(names[one] for one in same), _MOST_PATTERNS))
        for line in lines(found, first, case)
        if (same := first.get(line.device))  # a name may be another device's identity
    ]
    order = {device: place for place, device in enumerate(first)}
    rows.sort(key=lambda line: (worst_first(line), order[line.device]))
    left = [*odd[MOST_ODD:], *others[room:]]
    return Classes(lines=rows, left_out=_left_out(left, len(odd) - MOST_ODD), devices=len(names))


def _left_out(classes: Sequence[Sequence[str]], odd: int) -> str:
    if not classes:
        return ""
    devices = counted(sum(map(len, classes)), "device")
    text = f"{devices} in {len(classes)} further classes are not shown"
    return f"{text}; in {odd} of these classes they are inconsistent, lost or missing" if odd > 0 else text
