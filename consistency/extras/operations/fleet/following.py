"""Follow the nodes of a fleet: what each reports of itself, what its scheduler says of it, and what silence means."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

from consistency.capture.node_status import BEAT_S, NodeStatus
from consistency.capture.wording import counted
from consistency.extras.operations.fleet.schedulers.scheduler import FleetScheduler, SchedulerError, Standing, TaskState

ASK_SCHEDULER_S = 5.0
"""Seconds between two questions to a scheduler: a node reports by itself, and a scheduler has other users."""

_ENDED_GRACE_S = 3 * BEAT_S
"""Seconds that a node may be silent after its task has ended: what it wrote last may arrive late."""

_NO_SCHEDULER_S = 300.0  # a controller that is restarted is back by then
_READERS = 16  # statuses in a store far away are read side by side


class NodeState(StrEnum):
    """Where a node is on its way."""

    WAITING = "waiting"
    RUNNING = "running"
    DELIVERED = "delivered"
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        return self in (NodeState.DELIVERED, NodeState.LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a node is."""

    state: NodeState
    text: str = ""  # the stage of a node that runs, what a waiting one waits for, why one is lost

    def __str__(self) -> str:
        return f"{self.state}: {self.text}" if self.text else str(self.state)


NodeWatcher = Callable[[str, Progress], None]
"""Called with a node whose progress has changed."""

WAITING = TaskState(standing=Standing.WAITING)
"""State of a task of which the scheduler has said nothing yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """Limits of a node's time."""

    timeout_s: float | None = None  # from its start to its capture, the queue included; None without a limit
    stall_s: float = 60.0  # longest silence while it runs


@dataclass(slots=True, kw_only=True)
class FollowedNode:
    """One node; times are those of this host, because the clocks of nodes differ."""

    limits: NodeLimits
    started: float  # time when its task was submitted
    heard: float = field(init=False)  # time of its last sign of life
    beat: int = 0  # number of its last sign of life; 0 before the first
    running: float | None = None  # time since when its scheduler says that it runs
    ended: float | None = None  # time since when its scheduler says that it has ended

    def __post_init__(self) -> None:
        self.heard = self.started

    def judge(self, status: NodeStatus | None, task: TaskState, now: float) -> Progress:
        """Return how far it is. A node that gives signs of life is alive, whatever its scheduler says."""
        self._note_times(status, task, now)
        if status is not None and status.phase == "delivered":
            return Progress(state=NodeState.DELIVERED)
        if status is not None and status.phase == "failed":
            return _lost(status.reason)
        reason = self._why_lost(status, task, now)
        if reason is not None:
            return _lost(reason)
        if not self._has_started:
            return Progress(state=NodeState.WAITING, text=task.reason)
        return Progress(state=NodeState.RUNNING, text="start" if status is None else status.place)

    @property
    def _has_started(self) -> bool:
        """Return whether the node has given a sign of life, or its scheduler has said that it runs."""
        return self.beat != 0 or self.running is not None

    def _note_times(self, status: NodeStatus | None, task: TaskState, now: float) -> None:
        """Note what is new about the node, and since when."""
        if status is not None and status.beat != self.beat:
            self.beat, self.heard = status.beat, now
        if task.standing is Standing.RUNNING and self.running is None:
            self.running = now
        if task.standing is not Standing.ENDED:
            self.ended = None
        elif self.ended is None:
            self.ended = now

    def _why_lost(self, status: NodeStatus | None, task: TaskState, now: float) -> str | None:
        """Return why the node has to be given up; None where it may still deliver."""
        if self.limits.timeout_s is not None and now - self.started > self.limits.timeout_s:
            return f"late: nothing delivered within {self.limits.timeout_s:g} s; {self._last_stage(status, task)}"
        if self.ended is not None and now - max(self.ended, self.heard) > _ENDED_GRACE_S:
            return f"{task.reason}; {self._last_stage(status, task)}"
        if self.beat == 0 and task.standing is Standing.DOWN:
            return f"it takes no task: {task.reason}"
        # time in the queue is no silence, so it counts from when the node is known to run
        silent_s = now - max(self.heard, self.running or 0.0)
        if self._has_started and silent_s > self.limits.stall_s:
            return f"no sign of life for {self.limits.stall_s:g} s; {self._last_stage(status, task)}"
        return None

    def _last_stage(self, status: NodeStatus | None, task: TaskState) -> str:
        """Return how far a lost node had come."""
        if status is not None and self.beat:
            return f"last stage: {status.place}"
        return "it had not reported yet" if self.running is not None else f"it was waiting ({task.reason or 'queue'})"


def follow(
    scheduler: FleetScheduler,
    nodes: Collection[str],
    read: Callable[[str], NodeStatus | None],
    limits: NodeLimits,
    *,
    watch: NodeWatcher,
    pause_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Progress]:
    """Follow nodes whose tasks were submitted until each has delivered or is lost; a lost one is cancelled.

    `read` returns the status that a node has written last; nodes are looked at every `pause_s` seconds.
    """
    began = clock()
    followed = {node: FollowedNode(limits=limits, started=began) for node in nodes}
    progress_by_node: dict[str, Progress] = {}
    tasks = _Tasks(scheduler=scheduler, clock=clock)

    def is_over(node: str) -> bool:
        return node in progress_by_node and progress_by_node[node].state.is_final

    with ThreadPoolExecutor(_READERS) as pool:
        while unfinished := [node for node in followed if not is_over(node)]:
            states = tasks.states()
            lost = []
            for node, status in zip(unfinished, pool.map(read, unfinished), strict=True):
                progress = followed[node].judge(status, states.get(node, WAITING), clock())
                if tasks.is_dead and progress.state is NodeState.WAITING:
                    progress = _lost(f"the engine does not answer: {tasks.error}")
                if progress.state is NodeState.LOST:
                    lost.append(node)
                    progress = _with_scheduler_remark(scheduler, node, status, progress)
                if progress_by_node.get(node) != progress:
                    progress_by_node[node] = progress
                    watch(node, progress)
            if lost:
                scheduler.cancel(lost)
            if not all(is_over(node) for node in followed):
                sleep(pause_s)
    return progress_by_node


def _with_scheduler_remark(
    scheduler: FleetScheduler, node: str, status: NodeStatus | None, progress: Progress
) -> Progress:
    """Return why a node is lost, with what the scheduler says of it, unless the node has said why itself."""
    if status is not None and status.phase == "failed":
        return progress
    remark = scheduler.about(node)
    return _lost(f"{progress.text}; {remark}") if remark else progress


@dataclass(slots=True, kw_only=True)
class _Tasks:
    """The tasks of a scheduler that is asked now and then, and that may not answer for a while."""

    scheduler: FleetScheduler
    clock: Callable[[], float]
    error: str = ""  # why it did not answer last
    _states: Mapping[str, TaskState] = field(default_factory=dict)  # its last answer
    _asked_at: float | None = None
    _failing_since: float | None = None  # None where it answered last

    @property
    def is_dead(self) -> bool:
        """Return whether it has not answered for so long that nothing can be expected of it."""
        return self._failing_since is not None and self.clock() - self._failing_since > _NO_SCHEDULER_S

    def states(self) -> Mapping[str, TaskState]:
        """Return the last known state of the tasks, by node."""
        if self._asked_at is None or self.clock() - self._asked_at >= ASK_SCHEDULER_S:
            self._asked_at = self.clock()
            try:
                self._states, self._failing_since = self.scheduler.poll(), None
            except SchedulerError as error:
                self.error = str(error)
                if self._failing_since is None:
                    self._failing_since = self._asked_at
        return self._states


def _lost(reason: str) -> Progress:
    return Progress(state=NodeState.LOST, text=reason)


def lost_nodes(progress_by_node: Mapping[str, Progress]) -> Iterator[tuple[str, str]]:
    """Yield the nodes that are lost, and why."""
    for node, progress in progress_by_node.items():
        if progress.state is NodeState.LOST:
            yield node, progress.text


def other_software(statuses: Mapping[str, NodeStatus]) -> dict[str, str]:
    """Return the nodes whose software differs from that of most, each with what differs."""
    if not statuses:
        return {}
    counts = Counter(tuple(sorted(status.software.items())) for status in statuses.values())
    most_common, _ = counts.most_common(1)[0]  # of equally common ones, that of the first node
    usual = dict(most_common)
    differences = {}
    for node, status in statuses.items():
        packages = sorted({*usual, *status.software})
        remarks = [
            f"{package} {status.software.get(package, 'missing')}, not {usual.get(package, 'installed')}"
            for package in packages
            if usual.get(package) != status.software.get(package)
        ]
        if remarks:
            differences[node] = ", ".join(remarks)
    return differences


def without_accelerator(statuses: Mapping[str, NodeStatus]) -> dict[str, str]:
    """Return the nodes without an accelerator, each with a reason, in a fleet in which most have one."""
    equipped = [node for node, status in statuses.items() if status.accelerators]
    if 2 * len(equipped) <= len(statuses):
        return {}
    reason = f"no accelerator, but {counted(len(equipped), 'other node')} of the fleet have one"
    return {node: reason for node, status in statuses.items() if not status.accelerators}
