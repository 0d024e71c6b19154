"""Which stage of how many a worker is in, what share of the whole is done, and about how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from consistency.worker.protocol import Event

Expected = Mapping[str, Mapping[str, Sequence[tuple[str, float]]]]
"""Stages and their share of a worker's time, in order, by case and by the name of the worker."""

_ENOUGH_S, _ENOUGH = 5.0, 0.05
"""Before so much has passed and so large a share is done, a guess of the rest would jump about."""

_START = "start"
"""What a plan calls the time before a worker's first event, and `import libraries`."""


@dataclass(slots=True)
class _Course:
    """One worker: its cases done, the stages of the one that it is in, and how far it is in those."""

    stages: Sequence[tuple[str, float]] = ()
    number: int = 0
    within: float = 0.0
    cases_done: int = 0
    cases: int = 1
    ended: bool = False
    most: float = 0.0

    @property
    def share(self) -> float:
        """Return the share of all cases that is done."""
        if self.ended:
            return 1.0
        before = sum(share for _, share in self.stages[: self.number])
        here = self.stages[self.number][1] if self.number < len(self.stages) else 0.0
        return min(1.0, (self.cases_done + before + here * self.within) / self.cases)


@dataclass(slots=True)
class Eta:
    """Where the workers of a run are; `take` is given every event.

    Parameters
    ----------
    expected : mapping
        What is not in it has an unknown length: no share is shown then.
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
        """Note an event of a worker; one of no worker begins another round of all, such as a fault of a drill.

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
            case "step" if event.total:
                course.within = event.done / event.total
            case "done" | "failed":
                course.ended = course.cases_done + 1 >= course.cases
                course.number = len(course.stages)
        course.most = max(course.most, course.share)

    def place(self, label: str) -> tuple[int, int] | None:
        """Return the number of the stage that a worker is in, from 1, and how many it has."""
        course = self._courses.get(label)
        if course is None or not course.stages or course.number >= len(course.stages):
            return None
        return course.number + 1, len(course.stages)

    @property
    def share(self) -> float | None:
        """Return the share of the whole that is done; None where it is unknown."""
        if not self._labels:
            done, total = self._round
            return None if total == 1 else done / total
        now = sum(c.most for label, c in self._courses.items() if label in self._labels) / len(self._labels)
        return min(1.0, now)

    @property
    def left_s(self) -> float | None:
        """Return about how many seconds the rest takes; None where nothing is known yet."""
        share, elapsed_s = self.share, self.clock() - self._began
        if share is None or share < _ENOUGH or elapsed_s < _ENOUGH_S:
            return None
        return elapsed_s * (1 - share) / share

    @property
    def _labels(self) -> frozenset[str]:
        return frozenset(label for workers in self.expected.values() for label in workers)

    def _course(self, label: str) -> _Course:
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
