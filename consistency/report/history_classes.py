"""The devices of a fleet by what its runs saw of them: one row for all that were alike in every run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from consistency.capture.wording import counted, some
from consistency.comparison.history.records import MOST_APART, RunRecord
from consistency.report.history_table import Line, Night, lines, worst_first
from consistency.report.ranges import folded

MOST_CLASSES = 32
"""Rows of the page: a screen or two."""

MOST_ODD = 24
"""Of these rows, for devices that are not consistent: the largest others have the rest."""

_MOST_PATTERNS = 4
_NUMBER = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """The rows of a page, what they leave out, and the number of all devices."""

    lines: list[Line]
    left_out: str
    devices: int


def folded_names(names: Iterable[str], most: int = _MOST_PATTERNS) -> str:
    """Write names in their natural order as few patterns: `gpu-[0001-0128]:cuda:[0-7]`."""
    return some(patterns(names), most)


def patterns(names: Iterable[str]) -> list[str]:
    """Return patterns that stand for these names, in their natural order."""
    return folded(sorted(names, key=lambda name: [int(p) if p.isdigit() else p for p in _NUMBER.split(name)]))


def class_lines(found: Sequence[Night], device: str | None = None, case: str | None = None) -> Classes:
    """Return a row for each class of devices, or for each device where they are few, or one is asked for."""
    if device is not None:
        rows = lines(found, {device}, case)
        return Classes(lines=rows, left_out="", devices=len(rows))
    runs = [run for night in found for run in night.runs]
    classes = _Classes(case)
    for number, run in enumerate(runs):
        classes.take(number, run)
    if len(classes.names) <= MOST_APART:
        return Classes(lines=lines(found, None, case), left_out="", devices=len(classes.names))
    members = classes.members()
    bad = _bad(runs[-1], case)
    last = len(runs) - 1

    def is_odd(devices: Sequence[str]) -> bool:
        return devices[0] in bad or not any(run == last for run, _ in classes.seen[devices[0]])

    odd = sorted((devices for devices in members if is_odd(devices)), key=len)
    others = sorted((devices for devices in members if not is_odd(devices)), key=len, reverse=True)
    shown = odd[:MOST_ODD]
    shown += others[: MOST_CLASSES - len(shown)]
    first = {devices[0]: devices for devices in shown}
    names = {device: folded_names(classes.names[one] for one in devices) for device, devices in first.items()}
    rows = [
        replace(line, count=len(first[line.device]), names=names[line.device])
        for line in lines(found, first, case)
        if line.device in first
    ]
    order = {devices[0]: place for place, devices in enumerate(shown)}
    rows.sort(key=lambda line: (worst_first(line), order[line.device]))
    left = [*odd[MOST_ODD:], *others[MOST_CLASSES - min(len(odd), MOST_ODD) :]]
    return Classes(lines=rows, left_out=_left_out(left, len(odd) - MOST_ODD), devices=len(classes.names))


class _Classes:
    """The equivalence class of each device, by run."""

    def __init__(self, case: str | None) -> None:
        self.names: dict[str, str] = {}
        self.seen: dict[str, list[tuple[int, int]]] = {}
        self._case = case
        self._numbers: dict[tuple[tuple[str, str, int], ...], int] = {}

    def take(self, number: int, run: RunRecord) -> None:
        """Take the next run."""
        of: dict[str, list[tuple[str, str, int]]] = {}
        for cohort in run.workers.cohorts:
            if self._case not in (None, cohort.case or run.case):
                continue
            seen = (cohort.load_path, cohort.case, cohort.state)
            for device, name in run.workers.members(cohort):
                of.setdefault(device, []).append(seen)
                self.names[device] = name
        for device, found in of.items():
            alike = self._numbers.setdefault(tuple(sorted(found)), len(self._numbers))
            self.seen.setdefault(device, []).append((number, alike))

    def members(self) -> list[list[str]]:
        """Return the devices of each class."""
        found: dict[tuple[tuple[int, int], ...], list[str]] = {}
        for device, seen in self.seen.items():
            found.setdefault(tuple(seen), []).append(device)
        return list(found.values())


def _bad(run: RunRecord, case: str | None) -> set[str]:
    """Return the devices that were not consistent in a run."""
    return {
        device
        for cohort in run.workers.cohorts
        if case in (None, cohort.case or run.case) and (cohort.status != "ok" or cohort.verdict == "inconsistent")
        for device, _ in run.workers.members(cohort)
    }


def _left_out(classes: Sequence[Sequence[str]], odd: int) -> str:
    if not classes:
        return ""
    devices = counted(sum(map(len, classes)), "device")
    text = f"{devices} in {len(classes)} further classes are not shown"
    return f"{text}; in {odd} of these classes they are inconsistent, lost or missing" if odd > 0 else text
