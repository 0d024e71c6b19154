"""The seam between a fleet and the scheduler of its cluster: one task per node, watched and cancelled one by one.

A node reports its progress itself (`capture/node_status.py`), and delivers its capture itself. A scheduler (`--engine`)
starts it, and knows what the node cannot say: that it still waits, or that it is down.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from consistency.extras.operations.fleet.schedulers.options import SCHEDULERS, FleetOptions


class Standing(StrEnum):
    """The state of the task of a node, as its scheduler knows it."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    """It has run, or will not any more."""
    DOWN = "down"
    """It waits for a node that will not take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskState:
    """The task of a node, as its scheduler sees it; `reason` is in the scheduler's words."""

    standing: Standing
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTask:
    """The command that a node has to run."""

    node: str
    command: Sequence[str]
    """Run in the working directory of the fleet, on the whole node."""
    log: Path | None
    """The file for its output; None where there is no folder that all nodes see."""


class SchedulerError(Exception):
    """The scheduler did not answer; it may the next time."""


class FleetScheduler(Protocol):
    """Run one task per node of a cluster. A task that is lost must not end another, and none is ever repeated."""

    def nodes(self, given: str | None) -> tuple[str, ...]:
        """Return the nodes that a user names, each once and in order.

        Raises
        ------
        UsageError
            There is no such node, or none is named and there is no default.
        """
        ...

    def submit(self, task: NodeTask) -> None:
        """Have a task run as soon as its node is free.

        Raises
        ------
        UsageError
            The scheduler refuses it.
        """
        ...

    def poll(self) -> Mapping[str, TaskState]:
        """Return the state of all tasks by node.

        Raises
        ------
        SchedulerError
            The scheduler does not answer now.
        """
        ...

    def about(self, node: str) -> str:
        """Return the state of a silent node in the scheduler's words; empty where it knows none."""
        ...

    def cancel(self, nodes: Iterable[str]) -> None:
        """End the tasks of these nodes, whether they wait or run; those that have ended are left alone."""
        ...


def connect_scheduler(options: FleetOptions) -> FleetScheduler:
    """Return a new connection to the scheduler that the options name."""
    scheduler: FleetScheduler = pkgutil.resolve_name(SCHEDULERS[options.engine])(options)
    return scheduler
