"""What makes captures: the seam between planning a run and the hosts that it runs on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from consistency.case.case import Case
from consistency.launch.plan import WorkerPlan
from consistency.worker.protocol import Event

Watcher = Callable[[str, Event], None]
"""Called with the name of a worker, as people know it, and each of its events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a worker may take, in total and between two events; without `threads`, the processors are shared out."""

    timeout_s: float | None = None
    stall_s: float = 300.0
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be captured.

    Attributes
    ----------
    waves : sequence of sequence of WorkerPlan
        The workers of a host; a wave starts when the one before has ended.
    faults : mapping of str to str
        Fault to plant (of `consistency.worker.faults`) by name of the device.
    """

    case: Case
    waves: Sequence[Sequence[WorkerPlan]]
    limits: Limits
    faults: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The captures of a task, one folder or ZIP file per host; `lost` has a sentence for each host without one."""

    captures: tuple[Path, ...]
    lost: tuple[str, ...] = ()


class Engine(Protocol):
    """Get a task run, on this host or elsewhere.

    An engine ends everything that it has started when an exception passes through it; Ctrl-C is one.
    """

    def capture(self, task: Task, target: Path, *, watch: Watcher, replace: bool = False) -> Captured:
        """Leave captures at `target`: one host's there, those of several hosts below it.

        Raises
        ------
        InputError, UsageError, CaptureError
            The files of the case cannot be used, or a capture cannot be written: no host could do better.
        """
        ...


LOCAL = "local"

ENGINES: dict[str, str] = {LOCAL: "consistency.launch.local:LocalEngine"}
"""By name, where the class of each engine is: what it imports is imported when it is used."""


def engine(name: str) -> Engine:
    """Return a new engine."""
    module, _, kind = ENGINES[name].partition(":")
    found: Engine = getattr(importlib.import_module(module), kind)()
    return found
