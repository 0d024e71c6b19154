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
from consistency.comparison.outcomes import group_by_key
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
    columns = nights(history.runs(), last)
    runs = list(itertools.chain.from_iterable(night.runs for night in columns))
    classes = class_lines(columns, device, case)
    if not classes.lines and (device or case):
        devices = sorted(set().union(*(run.workers.devices for run in runs)))
        names = ", ".join(name for name in (device, case) if name)
        raise UsageError("no run has this device or this case", got=names, wanted=f"one of the devices {some(devices)}")
    # the changes are of all devices, so a page of one device or case has none
    shown_changes = [] if device or case else changes(runs)
    return _template().render(
        damage=history.damage,
        changes=[ChangeRow.of(change) for change in shown_changes[:_MOST_CHANGES]],
        changes_left_out=len(shown_changes[_MOST_CHANGES:]),
        devices=classes.lines,
        facts=_facts(columns, runs, classes.devices),
        left_out=classes.left_out,
        failed=[run for run in reversed(runs) if run.findings],
        marks=VERDICT_MARKS,
        most_findings=_MOST_FINDINGS,
        name=history.url,
        nights=columns,
        place=place,
        planted=[_minute(run) for run in runs if run.planted],
        simulated=any(run.workers.is_simulated for run in runs),
        style=Markup(part("style.css") + part("history.css", __package__)),
        tool=__version__,
        trend=Trend,
        verdict=columns[-1].verdict if columns else None,
    )


@functools.cache
def _template() -> jinja2.Template:
    """Return the page's template, compiled once per process."""
    environment = page_environment()
    environment.filters.update(link=_link, night_link=_night_link, colour=_colour)
    return environment.from_string(part("history.html", __package__))


def _colour(group: int | None) -> int | str:
    """Return the number of the colour of a class of bits: there are more classes than colours."""
    return "none" if group is None else group % _CLASSES


def _minute(run: RunRecord) -> str:
    """Return the time of a run to the minute."""
    return run.at[:16].replace("T", " ")


def _facts(columns: list[Night], runs: list[RunRecord], devices: int) -> list[str]:
    """Return how many runs, devices and hosts a page has, and from when to when."""
    hosts: set[str] = set()
    for run in runs:
        hosts.update(host or run.host for host in run.workers.hosts)
    facts = [counted(len(runs), "run"), counted(devices, "device"), counted(len(hosts), "host")]
    if columns:
        facts.append(f"{columns[0].began} to {columns[-1].began} UTC")
    return facts


def _night_link(night: Night, place: Path) -> str | None:
    """Return the link of a run with the worst verdict, if one of them has its report here."""
    links = (_link(run, place) for run in night.runs if run.verdict == night.verdict)
    return next((link for link in links if link is not None), None)


def _link(run: RunRecord, place: Path) -> str | None:
    """Return the link to a run's report, relative to the page's folder; None where the report is not on this host."""
    if not run.report:
        return None
    for name in _PAGES:
        page = Path(run.report, name)
        if page.is_file():
            return urllib.parse.quote(os.path.relpath(page, place.resolve()))
    return None


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
        return min(self.runs, key=lambda run: (_verdict_order(run.verdict), not run.findings))

    @property
    def began(self) -> str:
        """Return the time of the first run to the minute."""
        return _minute(self.runs[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One device in one night, over its load paths and cases."""

    run: RunRecord  # the run with this verdict
    verdict: str
    # class of bits: results with the same number are bitwise equal, where both were checked. None without any.
    group: int | None
    ratio: float | None  # worst error/tolerance; None where nothing has one
    drift: tuple[str, ...]  # stages that drifted
    change: str  # what differs from the run before: `other software`, `other inputs`; empty where nothing does

    @property
    def letter(self) -> str:
        return "–" if self.group is None else letter(self.group)

    @property
    def description(self) -> str:
        """Return the cell in words."""
        facts = [f"{_minute(self.run)}: {self.verdict}"]
        if self.group is not None:
            facts.append(f"bits {self.letter}")
        if self.drift:
            facts.append(f"drift in {', '.join(self.drift)}")
        if self.ratio is not None:
            facts.append(f"error/tolerance {self.ratio:.2f}")
        if self.change:
            facts.append(self.change)
        return ", ".join(facts)


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
    count: int = 1  # number of devices that share the line: they were alike in every run
    names: str = ""  # names of these devices, where they are several


@dataclass(slots=True)
class _DevicePast:
    """What the nights so far have of a device: its classes of bits, and its latest software and inputs."""

    groups: list[dict[Key, str]] = field(default_factory=list)  # digests of each class
    software: Mapping[Key, str] = field(default_factory=dict)
    inputs: Mapping[Key, str] = field(default_factory=dict)

    def group(self, bits: Mapping[Key, str]) -> int:
        """Return the class of a result: the first that agrees with it in everything that both have."""
        for number, digests in enumerate(self.groups):
            common = digests.keys() & bits.keys()
            if common and all(digests[key] == bits[key] for key in common):
                digests.update(bits)
                return number
        self.groups.append(dict(bits))
        return len(self.groups) - 1

    def changes(self, software: Mapping[Key, str], inputs: Mapping[Key, str]) -> str:
        """Return which of software and inputs is new in a night, and keep both for the next night."""
        changes = []
        if _differs(self.software, software):
            changes.append("other software")
        if _differs(self.inputs, inputs):
            changes.append("other inputs")
        self.software = {**self.software, **software}
        self.inputs = {**self.inputs, **inputs}
        return " and ".join(changes)


def _differs(earlier: Mapping[Key, str], now: Mapping[Key, str]) -> bool:
    """Return whether a digest is not as it was before; a key without an earlier digest is no difference."""
    return any(earlier.get(key, digest) != digest for key, digest in now.items())


def nights(runs: Iterable[RunRecord], most: int) -> list[Night]:
    """Gather runs, given from the latest on, into nights, the earliest first; no more than `most`, 0 for all."""
    runs_by_night: list[list[RunRecord]] = []
    for run in runs:
        if runs_by_night and _is_same_night(run, runs_by_night[-1]):
            runs_by_night[-1].append(run)
        elif most and len(runs_by_night) == most:
            break
        else:
            runs_by_night.append([run])
    return [Night(runs=tuple(reversed(latest_first))) for latest_first in reversed(runs_by_night)]


def lines(columns: Sequence[Night], devices: Collection[str] | None = None, case: str | None = None) -> list[Line]:
    """Return one line for each of some devices (identities or names; None: all): the worst in their last run first."""
    cells_by_device: dict[str, dict[int, Cell]] = {}  # cells of a device by the number of the night
    latest: dict[str, tuple[WorkerRecord, str]] = {}  # latest record of a device, and its host
    pasts: dict[str, _DevicePast] = {}
    for number, night in enumerate(columns):
        for device, records in _records_by_device(night, devices, case).items():
            cell = _cell(records, pasts.setdefault(device, _DevicePast()))
            cells_by_device.setdefault(device, {})[number] = cell
            run, worker = records[-1]
            latest[device] = worker, worker.host or run.host
    rows = []
    for device, cell_by_night in cells_by_device.items():
        cells = [cell_by_night.get(number) for number in range(len(columns))]
        ratios = [None if cell is None else cell.ratio for cell in cells]
        worker, host = latest[device]
        rows.append(Line(device=device, latest=worker, host=host, cells=tuple(cells), trend=trend(ratios)))
    return sorted(rows, key=lambda line: (worst_first(line), line.host))


def _records_by_device(
    night: Night, devices: Collection[str] | None, case: str | None
) -> dict[str, list[tuple[RunRecord, WorkerRecord]]]:
    """Return the runs and records of each device in a night, the earliest run first; `case` selects one case."""
    records: dict[str, list[tuple[RunRecord, WorkerRecord]]] = {}
    for run in night.runs:
        for worker in run.workers.select(devices):
            if case in (None, worker.case or run.case):
                records.setdefault(worker.device, []).append((run, worker))
    return records


def worst_first(line: Line) -> int:
    """Return the place of a line among others: those that are worse in their last run come first."""
    last_cell = next(cell for cell in reversed(line.cells) if cell)
    return _verdict_order(last_cell.verdict)


def trend(ratios: Sequence[float | None]) -> Trend:
    """Draw ratios from 0 to the largest of them; the last point is on the right."""
    numbers = [ratio for ratio in ratios if ratio is not None]
    top = max(numbers, default=0.0) if all(map(_fits, numbers)) else Trend.LARGEST
    top = top or 1.0  # all are 0
    height = Trend.HEIGHT - 2 * Trend.MARGIN

    def y(ratio: float) -> float:
        return round(Trend.HEIGHT - Trend.MARGIN - height * ratio / top, 2)

    places = [((number + 0.5) * Trend.WIDTH, ratio) for number, ratio in enumerate(ratios)]
    polylines: list[str] = []
    dots: list[tuple[float, float]] = []
    for is_drawn, group in itertools.groupby(places, key=lambda place: _fits(place[1])):
        if not is_drawn:
            continue
        points = [(x, y(ratio)) for x, ratio in group if ratio is not None]
        if len(points) > 1:
            polylines.append(" ".join(f"{x:g},{y:g}" for x, y in points))
        dots.append(points[-1])  # a line of one point would be invisible, and the end of a longer one is marked
    largest: float | None = None
    for ratio in numbers:
        largest = worse(ratio, largest)
    shows_limit = top >= 1.0 and dots
    return Trend(
        width=len(ratios) * Trend.WIDTH,
        lines=tuple(polylines),
        dots=tuple(dots),
        beyond=tuple(x for x, ratio in places if ratio is not None and not _fits(ratio)),
        limit=y(1.0) if shows_limit else None,
        last=numbers[-1] if numbers else None,
        largest=largest,
    )


def _fits(ratio: float | None) -> bool:
    """Return whether a ratio is drawn at its height: NaN is not, as it is not at most anything."""
    return ratio is not None and ratio <= Trend.LARGEST


def _is_same_night(earlier: RunRecord, night: Sequence[RunRecord]) -> bool:
    """Return whether a run is of a night whose runs are given from the latest on; a second run of a case is not."""
    first, latest = earlier.time, night[0].time
    runs_of_night = {(run.host, run.case) for run in night}
    return (earlier.host, earlier.case) not in runs_of_night and latest - first <= _NIGHT


def _cell(records: Sequence[tuple[RunRecord, WorkerRecord]], past: _DevicePast) -> Cell:
    """Return the cell of a device in a night, and add the night to the device's past."""
    workers: dict[Key, WorkerRecord]
    workers = {(worker.case or run.case, worker.load_path): worker for run, worker in records}
    whole = {key: worker for key, worker in workers.items() if worker.bits and worker.status == "ok"}
    bits: dict[Key, str] = {}
    for key, worker in whole.items():
        for stage, digest in worker.bits.items():
            bits[(*key, worker.inputs, stage)] = digest
    software = {key: worker.software for key, worker in whole.items()}
    inputs = {key: worker.inputs for key, worker in whole.items()}
    ratio: float | None = None
    for worker in workers.values():
        if worker.ratio is not None:
            ratio = worse(float(worker.ratio), ratio)
    drifted_stages = itertools.chain.from_iterable(worker.drift for worker in workers.values())
    worst_run, worst_worker = min(records, key=lambda record: _verdict_order(record[1].verdict))
    return Cell(
        run=worst_run,
        verdict=worst_worker.verdict,
        group=past.group(bits) if bits else None,
        ratio=ratio,
        drift=tuple(dict.fromkeys(drifted_stages)),
        change=past.changes(software, inputs),
    )


def _verdict_order(verdict: str) -> int:
    """Return the place of a verdict among all, the worst first; an unknown one is like `unchecked`."""
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


def class_lines(columns: Sequence[Night], device: str | None = None, case: str | None = None) -> Classes:
    """Return a row for each class of devices, or for each device where they are few, or one is asked for."""
    if device is not None:
        rows = lines(columns, {device}, case)
        return Classes(lines=rows, left_out="", devices=len(rows))
    runs = list(itertools.chain.from_iterable(night.runs for night in columns))
    observed = _observe_devices(runs, case)
    device_count = len(observed.names)
    if device_count <= MOST_APART:
        return Classes(lines=lines(columns, None, case), left_out="", devices=device_count)
    # devices of a class were seen alike in every run, in the same runs
    classes = group_by_key((tuple(sorted(states)), name) for name, states in observed.states.items()).values()
    odd = [devices for devices in classes if observed.is_odd(devices[0])]
    others = [devices for devices in classes if not observed.is_odd(devices[0])]
    # a small class of odd devices is the most remarkable, and a large class of the others says the most
    odd.sort(key=len)
    others.sort(key=len, reverse=True)
    others_room = MOST_CLASSES - len(odd[:MOST_ODD])
    shown = {devices[0]: devices for devices in (*odd[:MOST_ODD], *others[:others_room])}
    rows = []
    for line in lines(columns, shown, case):
        devices = shown.get(line.device)
        if devices:  # a name may be another device's identity
            names = some(patterns(observed.names[name] for name in devices), _MOST_PATTERNS)
            rows.append(replace(line, count=len(devices), names=names))
    order = {name: place for place, name in enumerate(shown)}
    rows.sort(key=lambda line: (worst_first(line), order[line.device]))
    left_out = [*odd[MOST_ODD:], *others[others_room:]]
    return Classes(lines=rows, left_out=_left_out(left_out, len(odd) - MOST_ODD), devices=device_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ObservedDevices:
    """What some runs saw of all devices, by identity."""

    last_run: int  # number of the last run
    names: dict[str, str] = field(default_factory=dict)  # names in the last run of each
    # number of the run, load path, case, and what was seen, for each worker of the device
    states: dict[str, list[tuple[int, str, str, bytes]]] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)  # identities of devices that are lost or inconsistent in the last run

    def is_odd(self, device: str) -> bool:
        """Return whether a device is bad, or is not in the last run."""
        return device in self.bad or self.states[device][-1][0] < self.last_run


def _observe_devices(runs: Sequence[RunRecord], case: str | None) -> _ObservedDevices:
    """Go through runs, given the earliest first, and note what they saw of each device; `case` selects one case."""
    observed = _ObservedDevices(last_run=len(runs) - 1)
    for number, run in enumerate(runs):
        # thousands of workers share a few observations, so each is encoded once
        states = [observation.state for observation in run.workers.seen]
        for name, device, _, place in run.workers.rows:
            worker = run.workers.seen[place]
            if case not in (None, worker.case or run.case):
                continue
            observed.names[device] = name
            state = (number, worker.load_path, worker.case, states[place])
            observed.states.setdefault(device, []).append(state)
            is_bad = worker.status != "ok" or worker.verdict == "inconsistent"
            if number == observed.last_run and is_bad:
                observed.bad.add(device)
    return observed


def _left_out(classes: Sequence[Sequence[str]], odd: int) -> str:
    """Return a sentence about the classes without a row, `odd` of which have odd devices; empty without any."""
    if not classes:
        return ""
    devices = counted(sum(map(len, classes)), "device")
    text = f"{devices} in {len(classes)} further classes are not shown"
    return f"{text}; in {odd} of these classes they are inconsistent, lost or missing" if odd > 0 else text
