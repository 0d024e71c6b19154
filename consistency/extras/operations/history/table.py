"""A history for people and programs: one line per run, one device from run to run, and what changed since when."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console

from consistency.capture.wording import and_more, counted, some, when
from consistency.errors import UsageError
from consistency.extras.operations.history.changes import Change, ChangeKind, changes
from consistency.extras.operations.history.records import RunRecord, WorkerRecord
from consistency.extras.operations.history.store import History, unfinished
from consistency.report.console import plain_cells, print_rows, without_trailing_blanks
from consistency.report.marks import letter
from consistency.report.ranges import patterns
from consistency.text import one_line

_MOST_FINDING = 100  # characters of a finding in a line
_MOST_DRIFTED = 6  # names of devices that drifted in a line
_MOST_NAMES = 16  # names of devices that drifted in a `RunRow`
_MOST_DEVICES = 64  # names of devices in the message that a device is unknown
_RECENT = 30  # runs whose devices that message names


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    at: str
    host: str
    case: str
    verdict: str
    devices: int
    lost: int
    drifted: tuple[str, ...]  # the first names of workers. `drifted_devices` is the number of all such devices.
    versions: dict[str, Any]
    findings: tuple[str, ...]
    cases: dict[str, str] = {}  # verdict of each case of a suite; empty for a run of one case
    drifted_devices: int = 0


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One device in one run."""

    at: str
    host: str
    name: str
    device: str
    load_path: str
    status: str
    case: str
    bits: dict[str, str]  # letters by stage: results with the same letter are bitwise equal
    change: str  # what changed since the run before: `drift in merged`, `other software`, `other inputs`


def run_rows(history: History, last: int) -> list[RunRow]:
    """Return the last runs, the latest first, also those that did not end; all of them where `last` is 0."""
    names = history.names()
    rows = [_run_row(run) for run in history.runs(_latest(names, last))]
    rows += [_run_row(note) for _, note in unfinished(history)]
    rows.sort(key=lambda row: row.at, reverse=True)
    return rows[:last] if last else rows


def _latest(names: list[str], last: int) -> list[str]:
    """Return the names of the last runs, all where `last` is 0."""
    return names[:last] if last else names


def _run_row(run: RunRecord) -> RunRow:
    drifted = run.workers.drifted
    return RunRow(
        at=run.at,
        host=run.host,
        case=run.case,
        verdict=run.verdict,
        devices=len(run.workers.devices),
        lost=run.workers.lost,
        drifted=tuple(dict.fromkeys(drifted.values()))[:_MOST_NAMES],
        versions=run.versions,
        findings=run.findings,
        cases=run.cases,
        drifted_devices=len(drifted),
    )


def device_rows(history: History, device: str, last: int, case: str | None = None) -> list[DeviceRow]:
    """Return one device from run to run, the latest first; `case` selects one case.

    Raises
    ------
    UsageError
        No run has it.
    """
    rows: list[DeviceRow] = []
    earlier_workers: dict[tuple[str, ...], WorkerRecord] = {}
    letters: dict[tuple[str, ...], dict[str, str]] = {}  # letters of digests, by worker and stage
    cases: set[str] = set()
    names = history.names()
    # the earliest first, so that a digest has the same letter however many rows are asked for
    for run in history.runs(names[::-1]):
        for worker in run.workers.select({device}):
            case_name = worker.case or run.case
            cases.add(case_name)
            if case not in (None, case_name):
                continue
            worker_key = (worker.case, worker.device, worker.load_path)
            bits = {}
            for stage, digest in worker.bits.items():
                letter_by_digest = letters.setdefault((*worker_key, stage), {})
                bits[stage] = letter_by_digest.setdefault(digest, letter(len(letter_by_digest)))
            row = DeviceRow(
                at=run.at,
                host=run.host,
                name=worker.name,
                device=worker.device,
                load_path=worker.load_path,
                status=worker.status,
                case=case_name,
                bits=bits,
                change=_change(earlier_workers.get(worker_key), worker),
            )
            rows.append(row)
            earlier_workers[worker_key] = worker
    if cases and not rows:
        raise UsageError("no run has this case on the device", where="--case", got=case, wanted=some(sorted(cases)))
    if not rows:
        devices = set().union(*(run.workers.devices for run in history.runs(names[:_RECENT])))
        wanted = some(sorted(devices), _MOST_DEVICES) or "none"
        raise UsageError("no run has this device", where="--device", got=device, wanted=wanted)
    rows.sort(key=lambda row: row.at, reverse=True)  # the cases of a run stay in their order
    return rows[:last] if last else rows


def print_runs(rows: list[RunRow], console: Console) -> None:
    """Print one line per run."""
    titles = ("run", "host", "case", "verdict", "devices", "drift", "torch", "first finding")
    cells = [
        plain_cells(
            when(row.at),
            row.host,
            _case_cell(row),
            row.verdict,
            _devices_cell(row),
            _drift_cell(row),
            row.versions.get("torch"),
            _first_finding(row),
        )
        for row in rows
    ]
    with without_trailing_blanks(console):
        print_rows(console, titles, cells)
        console.print(f"\n{counted(len(rows), 'run')}")


def print_device(rows: list[DeviceRow], device: str, console: Console) -> None:
    """Print one device from run to run."""
    stages = list(dict.fromkeys(itertools.chain.from_iterable(row.bits for row in rows)))
    titles = ("run", "case", "name", "load path", "status", *stages, "changed since the run before")
    cells = []
    for row in rows:
        letters = [row.bits.get(stage) for stage in stages]
        cells.append(plain_cells(when(row.at), row.case, row.name, row.load_path, row.status, *letters, row.change))
    with without_trailing_blanks(console):
        console.print(f"{one_line(device)}: equal letters are bitwise equal results\n")
        print_rows(console, titles, cells)


def _case_cell(row: RunRow) -> str:
    """Return the name of a case, or of a suite with the number of its cases."""
    return f"{row.case} ({counted(len(row.cases), 'case')})" if row.cases else row.case


def _devices_cell(row: RunRow) -> str:
    """Return the number of devices, and of workers that were lost."""
    return f"{row.devices} ({row.lost} lost)" if row.lost else f"{row.devices}"


def _first_finding(row: RunRow) -> str:
    return textwrap.shorten(row.findings[0], _MOST_FINDING, placeholder=" …") if row.findings else ""


def _drift_cell(row: RunRow) -> str:
    """Return the first devices that drifted, and the number of the others."""
    left_out = row.drifted_devices - _MOST_DRIFTED
    if left_out <= 0:
        return ", ".join(row.drifted)
    return f"{', '.join(row.drifted[:_MOST_DRIFTED])} {and_more(left_out)}"


def _change(before: WorkerRecord | None, now: WorkerRecord) -> str:
    """Return what changed on a worker since its run before; empty where nothing did."""
    changes = []
    if now.drift:
        changes.append(f"drift in {', '.join(now.drift)}")
    if before is not None and before.software != now.software:
        changes.append("other software")
    if before is not None and before.inputs != now.inputs:
        changes.append("other inputs")
    return "; ".join(changes)


_MOST_PATTERNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phrase:
    """The words of a table for a kind of change."""

    alone: str  # words for a change without a detail
    before_detail: str = ""  # words before the detail; empty where the table leaves the detail out

    def about(self, detail: str) -> str:
        """Return the words for a change with a detail, which may be empty."""
        return f"{self.before_detail}{detail}" if detail and self.before_detail else self.alone


_PHRASES = {
    ChangeKind.DRIFT: _Phrase(alone="drift", before_detail="drift in "),
    ChangeKind.SOFTWARE: _Phrase(alone="other software or settings", before_detail="other software or settings: "),
    ChangeKind.INPUTS: _Phrase(alone="other inputs"),
    ChangeKind.LOST: _Phrase(alone="worker lost"),
    ChangeKind.INCONSISTENT: _Phrase(alone="inconsistent"),
    ChangeKind.GONE: _Phrase(alone="missing"),
    ChangeKind.NEW: _Phrase(alone="new"),
}

_POINTS = frozenset({ChangeKind.SOFTWARE, ChangeKind.INPUTS, ChangeKind.NEW})
"""Kinds of changes at a moment, which have no end; the others last until a run without them."""


class ChangeRow(Change, frozen=True, kw_only=True):
    """A change, with the names of its workers as patterns (`gpu-[0001-0128]:cuda:[0-7]`)."""

    @classmethod
    def of(cls, change: Change) -> ChangeRow:
        return cls(**{**msgspec.structs.asdict(change), "workers": tuple(patterns(change.workers))})

    @property
    def began(self) -> str:
        """Return the time of the first run with it; it may be older than the history."""
        return when(self.since) + (" or earlier" if self.before is None else "")

    @property
    def when(self) -> str:
        """Return the time in words."""
        if self.until is not None:
            return f"{self.began} until {when(self.until)}"
        return self.began if self.kind in _POINTS else f"since {self.began}"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Return the cells of a line: begin, end, change and devices."""
        if self.kind in _POINTS:
            until = ""
        elif self.until is None:
            until = "now"
        else:
            until = when(self.until)
        devices = some(self.workers, _MOST_PATTERNS)
        if self.devices != 1:
            devices = f"{counted(self.devices, 'device')}: {devices}"
        return self.began, until, _PHRASES[self.kind].about(self.detail), devices


def change_rows(history: History, last: int) -> list[ChangeRow]:
    """Return what changed over the last runs, or over all of them where `last` is 0: the latest change first."""
    earliest_first = reversed(_latest(history.names(), last))
    return [ChangeRow.of(change) for change in changes(history.runs(list(earliest_first)))]


def print_changes(rows: Sequence[ChangeRow], console: Console) -> None:
    """Print one line per change."""
    with without_trailing_blanks(console):
        print_rows(console, ("since", "until", "change", "devices"), [plain_cells(*row.cells) for row in rows])
        console.print(f"\n{counted(len(rows), 'change')}")
