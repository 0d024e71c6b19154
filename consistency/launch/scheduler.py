"""Schedulers get captures made: the seam between planning a run and the hosts that it runs on."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from consistency.capture.node_group import NodeGroup
from consistency.case.case import Case
from consistency.errors import ConsistencyError
from consistency.launch.plan import WorkerPlan
from consistency.worker.protocol import Event

Watcher = Callable[[str, Event], None]
"""Called with the name of a worker, as people know it, and each of its events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long workers may take, and how many of them run side by side."""

    timeout_s: float | None = None
    """Seconds that a worker may take for a case in total; None for any time."""
    stall_s: float = 300.0
    """Seconds that may pass between two events of a worker."""
    threads: int | None = None
    """Threads per worker; None shares the processors out."""
    at_once: int | None = None
    """How many workers of a case run side by side at most, so that they fit the host's memory; None for all."""
    cases_at_once: int = 1
    """How many cases run side by side at most."""
    together: NodeGroup | None = None
    """The other nodes whose workers form a group with this host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTask:
    """One case of a task."""

    case: Case
    waves: Sequence[Sequence[WorkerPlan]]
    """The workers of a host; a wave starts when the one before has ended."""
    target: Path
    """Folder of the capture, or above the captures where there are several hosts."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Fault to plant (of `consistency.worker.faults`) by name of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Cases to capture, in the order in which each worker takes them."""

    cases: Sequence[CaseTask]
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The captures of a case, one folder or ZIP file per host."""

    task: CaseTask
    captures: tuple[Path, ...] = ()
    lost: tuple[str, ...] = ()
    """A sentence for each host without a capture."""
    error: ConsistencyError | None = None
    """Why there is no capture: no host can use the files of the case."""


class Scheduler(Protocol):
    """Get a task run, on this host or elsewhere.

    A scheduler ends everything that it has started when an exception passes through it or its generator is closed;
    Ctrl-C is one.
    """

    def capture(self, task: Task, *, watch: Watcher, replace: bool = False) -> Generator[Captured]:
        """Run the cases, and yield the captures of a case when its last worker has ended; other cases go on meanwhile.

        Raises
        ------
        CaptureError
            The tables of a capture cannot be written, although room was kept for them: no other case's could be either.
        """
        ...


LOCAL = "local"

SCHEDULERS: dict[str, str] = {
    LOCAL: "consistency.launch.local:LocalScheduler",
}
"""The class of each scheduler as `module:name`, by the name of the scheduler; it is imported when it is used."""


def make_scheduler(name: str) -> Scheduler:
    """Return a new scheduler, by a name of `SCHEDULERS`."""
    scheduler: Scheduler = pkgutil.resolve_name(SCHEDULERS[name])()
    return scheduler


def capture_case(
    scheduler: Scheduler, task: CaseTask, limits: Limits, *, watch: Watcher, replace: bool = False
) -> Captured:
    """Run a single case, and return its captures.

    Raises
    ------
    ConsistencyError
        The files of the case cannot be used, or the capture not be written.
    """
    # closing the generator ends everything that the scheduler has started
    single = Task(cases=(task,), limits=limits)
    with closing(scheduler.capture(single, watch=watch, replace=replace)) as cases:
        captured = next(cases)
    if captured.error is not None:
        raise captured.error
    return captured
