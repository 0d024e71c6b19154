"""How far the nodes of a fleet are: what each says of itself, what its engine says of it, and what silence means."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

from consistency.capture.node_status import BEAT_S, NodeStatus
from consistency.capture.wording import counted
from consistency.extras.operations.fleet.schedulers.engine import EngineError, FleetEngine, Standing, TaskState

ASK_ENGINE_S = 5.0
"""How often an engine is asked: a node reports by itself, and a scheduler has other users."""

_ENDED_GRACE_S = 3 * BEAT_S
"""How long a node may be silent after its task has ended: what it wrote last may arrive late."""

_NO_ENGINE_S = 300.0  # a controller that is restarted is back by then
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
    """How far a node is: the stage of one that runs, what one waits for, why one is lost."""

    state: NodeState
    text: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.text}" if self.text else str(self.state)


NodeWatcher = Callable[[str, Progress], None]
"""Called with a node whose progress has changed."""

WAITING = TaskState(standing=Standing.WAITING)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """How long a node may take in total, and how long a running one may be silent."""

    timeout_s: float | None = None
    stall_s: float = 60.0


@dataclass(slots=True, kw_only=True)
class FollowedNode:
    """One node; times are those of this host, because the clocks of nodes differ."""

    limits: NodeLimits
    started: float  # when its task was submitted
    # heard, beat: when it last gave a sign of life, and the last one
    heard: float = field(init=False)
    beat: int = 0
    # running, ended: since when its engine says so
    running: float | None = None
    ended: float | None = None

    def __post_init__(self) -> None:
        self.heard = self.started

    def judge(self, status: NodeStatus | None, task: TaskState, now: float) -> Progress:
        """Return how far it is. A node that gives signs of life is alive, whatever its engine says."""
        if status is not None and status.beat != self.beat:
            self.beat, self.heard = status.beat, now
        if task.standing is Standing.RUNNING and self.running is None:
            self.running = now
        if task.standing is not Standing.ENDED:
            self.ended = None
        elif self.ended is None:
            self.ended = now
        if status is not None and status.phase == "delivered":
            return Progress(state=NodeState.DELIVERED)
        if status is not None and status.phase == "failed":
            return _lost(status.reason)
        if self.limits.timeout_s is not None and now - self.started > self.limits.timeout_s:
            return _lost(f"late: nothing delivered within {self.limits.timeout_s:g} s; {self._last(status, task)}")
        if self.ended is not None and now - max(self.ended, self.heard) > _ENDED_GRACE_S:
            return _lost(f"{task.reason}; {self._last(status, task)}")
        if self.beat == 0 and task.standing is Standing.DOWN:
            return _lost(f"it takes no task: {task.reason}")
        if self.beat == 0 and self.running is None:
            return Progress(state=NodeState.WAITING, text=task.reason)
        silent_s = now - max(self.heard, self.running or 0.0)
        if silent_s > self.limits.stall_s:
            return _lost(f"no sign of life for {self.limits.stall_s:g} s; {self._last(status, task)}")
        return Progress(state=NodeState.RUNNING, text="start" if status is None else status.place)

    def _last(self, status: NodeStatus | None, task: TaskState) -> str:
        if status is not None and self.beat:
            return f"last stage: {status.place}"
        return "it had not reported yet" if self.running is not None else f"it was waiting ({task.reason or 'queue'})"


def follow(
    engine: FleetEngine,
    nodes: Collection[str],
    read: Callable[[str], NodeStatus | None],
    limits: NodeLimits,
    *,
    watch: NodeWatcher,
    pause_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Progress]:
    """Follow nodes whose tasks were submitted until each has delivered or is lost; a lost one is cancelled."""
    began = clock()
    followed = {node: FollowedNode(limits=limits, started=began) for node in nodes}
    found: dict[str, Progress] = {}
    asking = _Asking(engine=engine, clock=clock)
    with ThreadPoolExecutor(_READERS) as pool:
        while unfinished := [node for node in followed if node not in found or not found[node].state.is_final]:
            tasks = asking.tasks()
            lost = []
            for node, status in zip(unfinished, pool.map(read, unfinished), strict=True):
                progress = followed[node].judge(status, tasks.get(node, WAITING), clock())
                if asking.is_dead and progress.state is NodeState.WAITING:
                    progress = _lost(f"the engine does not answer: {asking.error}")
                if progress.state is NodeState.LOST:
                    lost.append(node)
                    spoke = status is not None and status.phase == "failed"  # it has said why itself
                    about = "" if spoke else engine.about(node)
                    progress = _lost(f"{progress.text}; {about}" if about else progress.text)
                if found.get(node) != progress:
                    found[node] = progress
                    watch(node, progress)
            if lost:
                engine.cancel(lost)
            if any(not progress.state.is_final for progress in found.values()):
                sleep(pause_s)
    return found


@dataclass(slots=True, kw_only=True)
class _Asking:
    """An engine that is asked now and then, and that may not answer for a while."""

    engine: FleetEngine
    clock: Callable[[], float]
    error: str = ""
    _known: Mapping[str, TaskState] = field(default_factory=dict)
    _asked: float | None = None
    _failing: float | None = None

    @property
    def is_dead(self) -> bool:
        """Return whether it has not answered for so long that nothing can be expected of it."""
        return self._failing is not None and self.clock() - self._failing > _NO_ENGINE_S

    def tasks(self) -> Mapping[str, TaskState]:
        """Return the last known state of the tasks."""
        if self._asked is None or self.clock() - self._asked >= ASK_ENGINE_S:
            self._asked = self.clock()
            try:
                self._known, self._failing = self.engine.poll(), None
            except EngineError as error:
                self.error = str(error)
                self._failing = self._asked if self._failing is None else self._failing
        return self._known


def _lost(reason: str) -> Progress:
    return Progress(state=NodeState.LOST, text=reason)


def lost_nodes(found: Mapping[str, Progress]) -> Iterator[tuple[str, str]]:
    """Yield the nodes that are lost, and why."""
    return ((node, progress.text) for node, progress in found.items() if progress.state is NodeState.LOST)


def other_software(statuses: Mapping[str, NodeStatus]) -> dict[str, str]:
    """Return the nodes whose software differs from that of most, each with what differs."""
    if not statuses:
        return {}
    kinds = Counter(tuple(sorted(status.software.items())) for status in statuses.values())
    usual = dict(kinds.most_common(1)[0][0])  # of equally common ones, that of the first node
    found = {}
    for node, status in statuses.items():
        names = sorted(name for name in {*usual, *status.software} if usual.get(name) != status.software.get(name))
        if names:
            found[node] = ", ".join(
                f"{name} {status.software.get(name, 'missing')}, not {usual.get(name, 'installed')}" for name in names
            )
    return found


def without_accelerator(statuses: Mapping[str, NodeStatus]) -> dict[str, str]:
    """Return the nodes without an accelerator in a fleet in which most have one."""
    having = [node for node, status in statuses.items() if status.accelerators]
    if 2 * len(having) <= len(statuses):
        return {}
    text = f"no accelerator, but {counted(len(having), 'other node')} of the fleet have one"
    return {node: text for node, status in statuses.items() if not status.accelerators}
