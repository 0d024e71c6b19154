"""What makes captures: the seam between planning a run and the hosts that it runs on."""

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
    """How long a worker may take for a case, in total and between two events.

    Without `threads`, the processors are shared out; `at_once` is how many workers of a case run side by side at most,
    so that they fit the host's memory, and `cases_at_once` how many cases do; `together` names the other nodes whose
    workers form a group with this host's.
    """

    timeout_s: float | None = None
    stall_s: float = 300.0
    threads: int | None = None
    at_once: int | None = None
    cases_at_once: int = 1
    together: NodeGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTask:
    """One case of a task."""

    case: Case
    waves: Sequence[Sequence[WorkerPlan]]
    """The workers of a host; a wave starts when the one before has ended."""
    target: Path
    """Where its captures go: one host's there, those of several hosts below it."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Fault to plant (of `consistency.worker.faults`) by name of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be captured: cases, in the order in which each worker takes them."""

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


class Engine(Protocol):
    """Get a task run, on this host or elsewhere.

    An engine ends everything that it has started when an exception passes through it or its generator is closed;
    Ctrl-C is one.
    """

    def capture(self, task: Task, *, watch: Watcher, replace: bool = False) -> Generator[Captured]:
        """Run the cases, and yield each of them when all of its workers have ended; the others go on meanwhile.

        Raises
        ------
        CaptureError
            The tables of a capture cannot be written, although room was kept for them: no other case's could be either.
        """
        ...


LOCAL = "local"

ENGINES: dict[str, str] = {
    LOCAL: "consistency.launch.local:LocalEngine",
}
"""By name, where the class of each engine is: what it imports is imported when it is used."""


def engine(name: str) -> Engine:
    """Return a new engine."""
    found: Engine = pkgutil.resolve_name(ENGINES[name])()
    return found


def capture_case(on: Engine, task: CaseTask, limits: Limits, *, watch: Watcher, replace: bool = False) -> Captured:
    """Run a single case, and raise why it cannot be used."""
    with closing(on.capture(Task(cases=(task,), limits=limits), watch=watch, replace=replace)) as found:
        captured = next(found)
    if captured.error is not None:
        raise captured.error
    return captured
