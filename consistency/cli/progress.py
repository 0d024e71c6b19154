"""The progress of a run: a line per worker with stage and layer, and one for the whole with the time left."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from consistency.report.console import make_console
from consistency.text import one_line
from consistency.worker.protocol import Event

Expected = Mapping[str, Mapping[str, Sequence[tuple[str, float]]]]
"""The stages of each worker, by case and by the worker's name: in order, with their part of the worker's time, from 0
to 1."""

_ENOUGH_S, _ENOUGH = 5.0, 0.05
"""Seconds, and part of the whole, before which a guess of the time left would jump about."""

_START = "start"
"""Name in a plan of the time before a worker's first event, and of the step `import libraries`."""


@dataclass(slots=True)
class _Course:
    """How far one worker is: its cases done, the stages of its current case, and its place in those.

    Attributes
    ----------
    stages : sequence of (str, float)
        As in `Expected`.
    number : int
        Index of the current stage.
    within : float
        Part of the current stage that is done, from 0 to 1.
    most : float
        The largest share so far: a worker that begins a part of a stage again takes nothing back.
    """

    stages: Sequence[tuple[str, float]] = ()
    number: int = 0
    within: float = 0.0
    cases_done: int = 0
    cases: int = 1
    ended: bool = False
    most: float = 0.0

    @property
    def share(self) -> float:
        """Return the part of all cases that is done, from 0 to 1."""
        if self.ended:
            return 1.0
        before = sum(share for _, share in self.stages[: self.number])
        current = self.stages[self.number][1] if self.number < len(self.stages) else 0.0
        return min(1.0, (self.cases_done + before + current * self.within) / self.cases)


@dataclass(slots=True)
class Eta:
    """The progress of the workers of a run, and a guess of the time left; `take` is given every event.

    Parameters
    ----------
    expected : mapping
        A worker that is not in it has an unknown length: no part of the whole is shown then.
    clock : callable
        Returns seconds.
    """

    expected: Expected = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    _courses: dict[str, _Course] = field(default_factory=dict)
    _began: float = 0.0
    _round: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def take(self, label: str, event: Event) -> None:
        """Note an event of a worker; an event of none begins another round of all, such as a fault of a drill.

        A worker that begins a part of a stage again does not take back what was done.
        """
        if not label:
            self._round = (event.done, max(1, event.total))
            self._courses.clear()
            return
        course = self._course(label)
        match event.kind:
            case "case":
                course.stages = self.expected.get(event.message, {}).get(label, ())
                course.cases_done, course.cases = event.done, max(1, event.total)
                course.number, course.within, course.ended = 0, 0.0, False
            case "stage":
                names = [name for name, _ in course.stages]
                name = event.stage if event.stage in names else _START
                if name in names[course.number :]:
                    course.number = names.index(name, course.number)
                course.within = 0.0
            case "step" if event.share is not None:
                course.within = event.share
            case "step" if event.total:
                course.within = event.done / event.total
            case "done" | "failed":
                course.ended = course.cases_done + 1 >= course.cases
                course.number = len(course.stages)
        course.most = max(course.most, course.share)

    def place(self, label: str) -> tuple[int, int] | None:
        """Return the number of a worker's current stage, from 1, and how many it has; None where that is unknown."""
        course = self._courses.get(label)
        if course is None or not course.stages or course.number >= len(course.stages):
            return None
        return course.number + 1, len(course.stages)

    @property
    def share(self) -> float | None:
        """Return the part of the whole that is done, from 0 to 1; None where it is unknown."""
        labels = self._labels
        if not labels:
            done, total = self._round
            return None if total == 1 else done / total
        done_parts = [course.most for label, course in self._courses.items() if label in labels]
        return min(1.0, sum(done_parts) / len(labels))

    @property
    def left_s(self) -> float | None:
        """Return about how many seconds are left; None where nothing is known yet."""
        share, elapsed_s = self.share, self.clock() - self._began
        if share is None or share < _ENOUGH or elapsed_s < _ENOUGH_S:
            return None
        return elapsed_s * (1 - share) / share

    @property
    def _labels(self) -> frozenset[str]:
        """Return the names of all workers whose stages are known."""
        return frozenset(itertools.chain.from_iterable(self.expected.values()))

    def _course(self, label: str) -> _Course:
        """Return the course of a worker; before its first case, it has the stages of any of its cases."""
        if label not in self._courses:
            stages = next((workers[label] for workers in self.expected.values() if label in workers), ())
            self._courses[label] = _Course(stages=stages)
        return self._courses[label]


def format_eta(seconds: float) -> str:
    """Write a guess of the time left, as coarse as it is: `20 s left`, `3 min left`, `1 h 10 min left`."""
    if seconds < 10:
        return "less than 10 s left"
    if seconds < 90:
        return f"about {5 * round(seconds / 5)} s left"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"about {minutes} min left"
    return f"about {minutes // 60} h {10 * (minutes % 60 // 10)} min left"


SILENT_S = 10.0
"""Seconds after which a reader of a log gets a line, even where nothing has happened."""


class Display:
    """Shows the events of workers, as a `Watcher`, and lines of a command in between; this class shows nothing."""

    def __call__(self, label: str, event: Event) -> None:
        """Show an event."""

    def line(self, text: str) -> None:
        """Print a line that stays."""


@contextmanager
def progress(
    console: Console | None = None, *, expected: Expected | None = None, stages: bool = True, quiet: bool = False
) -> Iterator[Display]:
    """Yield a watcher: moving lines on a terminal, elsewhere one plain line per stage, and one when it has been silent.

    `expected` has the stages of the workers, as far as they are known beforehand; without `stages`, a pipe gets no line
    for each stage. With `quiet`, nothing is shown.
    """
    if quiet:
        yield Display()
        return
    console = console or make_console(sys.stderr)
    outlook = Eta(expected or {})
    if not console.is_terminal:
        with _Plain(console, outlook, stages=stages).speaking() as plain:
            yield plain
        return
    bars = Progress(
        TextColumn("{task.fields[label]}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bars:
        yield _Moving(bars, outlook)


def _case_text(event: Event) -> str:
    """Return the name of a case that begins, with its number where there are several."""
    count = f" ({event.done + 1} of {event.total})" if event.total > 1 else ""
    return f"{one_line(event.message)}{count}"


class _Plain(Display):
    """Prints a line per stage, or a line per case where there are several."""

    def __init__(self, console: Console, outlook: Eta, *, stages: bool) -> None:
        self._console = console
        self._stages = stages
        self._outlook = outlook
        self._of_several: set[str] = set()
        self._running: dict[str, tuple[float, str]] = {}  # since when a worker is where
        self._spoke = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, label: str, event: Event) -> None:
        with self._lock:
            self._outlook.take(label, event)
            self._note(label, event)
            if event.kind == "failed" and not event.error:
                self._print(f"{label}: {one_line(event.message)}")
            elif event.kind in ("stage", "done") and self._stages and label not in self._of_several:
                self._print(f"{label}: {event.stage or 'done'}{self._outlook_text(label)}")
            elif event.kind == "case":
                self._of_several.add(label)
                prefix = f"{label}: " if label else ""
                self._print(f"{prefix}case {_case_text(event)}")

    def line(self, text: str) -> None:
        with self._lock:
            self._print(one_line(text))

    @contextmanager
    def speaking(self) -> Iterator[_Plain]:
        """Print where the workers are whenever nothing was printed for a while."""
        over = threading.Event()

        def speak() -> None:
            while not over.wait(SILENT_S / 4):
                with self._lock, suppress(BrokenPipeError):  # the next event's line ends the run
                    if time.monotonic() - self._spoke > SILENT_S - SILENT_S / 4:
                        self._print_running()

        thread = threading.Thread(target=speak, name="consistency-progress", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            over.set()
            thread.join()

    def _note(self, label: str, event: Event) -> None:
        """Note where a worker is, and since when, for the line after a silence."""
        now = time.monotonic()
        if event.kind in ("done", "failed", "case"):
            self._running.pop(label, None)
            return
        if event.kind == "stage":
            self._running[label] = (now, event.stage)
            return
        # a step or a wait does not begin the stage again
        since = self._running.get(label, (now, ""))[0]
        if event.kind == "step":
            steps = f" ({event.done + 1} of {event.total})" if event.total else ""
            where = f"{event.stage}, {event.layer}{steps}"
            if event.block_text:
                where = f"{where}, {event.block_text}"
            self._running[label] = (since, where)
        elif event.kind == "wait":
            self._running[label] = (since, f"waits {event.message}")

    def _print_running(self) -> None:
        """Print where the first workers are, and for how long."""
        now = time.monotonic()
        texts = [
            f"{label} {one_line(where)} for {now - since:.0f} s" for label, (since, where) in self._running.items()
        ]
        listing = "; ".join(texts[:4]) or "no worker has reported yet"
        if len(texts) > 4:
            listing += f"; and {len(texts) - 4} more workers"
        self._print(f"still running: {listing}{self._outlook_text('')}")

    def _outlook_text(self, label: str) -> str:
        """Return a worker's stage, the part of the run that is done, and the time left, as far as they are known."""
        place, share, left_s = self._outlook.place(label), self._outlook.share, self._outlook.left_s
        parts = []
        if place is not None:
            parts.append(f"{place[0]} of {place[1]}")
        if share is not None and share not in (0.0, 1.0):
            parts.append(f"{100 * share:.0f} % of the run")
        if left_s is not None and share != 1.0:
            parts.append(format_eta(left_s))
        return f"  ({', '.join(parts)})" if parts else ""

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
        self._spoke = time.monotonic()


class _Moving(Display):
    """Shows a moving line per worker, and one for the whole run."""

    def __init__(self, bars: Progress, outlook: Eta) -> None:
        self._bars = bars
        self._outlook = outlook
        self._whole = bars.add_task("", total=1.0, label="all", visible=False)
        self._tasks: dict[str, TaskID] = {}
        self._cases: dict[str, str] = {}

    def __call__(self, label: str, event: Event) -> None:
        self._outlook.take(label, event)
        if label:
            self._show_worker(label, event)
        else:
            # another round of all workers: their lines begin anew
            for task in self._tasks.values():
                self._bars.remove_task(task)
            self._tasks.clear()
            self._cases = {"": f"{one_line(event.message)} ({event.done + 1} of {event.total})  "}
        share, left_s = self._outlook.share, self._outlook.left_s
        if share is not None:
            text = f"{self._cases.get('', '')}{100 * share:.0f} %"
            if left_s is not None:
                text += f", {format_eta(left_s)}"
            self._bars.update(self._whole, completed=share, description=text, visible=True)

    def line(self, text: str) -> None:
        self._bars.console.print(one_line(text), soft_wrap=True)

    def _show_worker(self, label: str, event: Event) -> None:
        """Update the line of a worker."""
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task("", total=None, label=label)
        task, case = self._tasks[label], self._cases.get(label, "")
        place = self._outlook.place(label)
        number = "" if place is None else f"{place[0]}/{place[1]}  "
        update = self._bars.update
        match event.kind:
            case "case":
                self._cases[label] = f"{_case_text(event)}  "
                update(task, description=self._cases[label], completed=0, total=None)
            case "stage":
                update(task, description=f"{case}{number}{event.stage}", completed=0, total=None)
            case "step":
                text = case + number + one_line(f"{event.stage}  {event.layer}  {event.block_text}".rstrip())
                done, total = event.done, event.total
                if event.blocks:
                    done, total = event.block - 1, event.blocks
                update(task, description=text, completed=done, total=total or None)
            case "wait":
                update(task, description=f"{case}waits {event.message}")
            case "done":
                update(task, description=f"{case}done", completed=1, total=1)
            case "failed":
                update(task, description=case + one_line(event.message or "failed"))
