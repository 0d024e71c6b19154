"""The devices of a fleet by what its runs saw of them: one row for all that were alike in every run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from consistency.capture.wording import counted, some
from consistency.comparison.history.records import MOST_APART
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
    classes: dict[tuple[tuple[int, str, str, bytes], ...], list[str]] = {}
    for of, what in seen.items():
        classes.setdefault(tuple(sorted(what)), []).append(of)

    def is_odd(devices: Sequence[str]) -> bool:
        return devices[0] in bad or seen[devices[0]][-1][0] < len(runs) - 1

    odd = sorted((devices for devices in classes.values() if is_odd(devices)), key=len)
    others = sorted((devices for devices in classes.values() if not is_odd(devices)), key=len, reverse=True)
    room = MOST_CLASSES - len(odd[:MOST_ODD])
    first = {devices[0]: devices for devices in (*odd[:MOST_ODD], *others[:room])}
    rows = [
        replace(line, count=len(first[line.device]), names=folded_names(names[one] for one in first[line.device]))
        for line in lines(found, first, case)
        if line.device in first  # a name may be another device's identity
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
