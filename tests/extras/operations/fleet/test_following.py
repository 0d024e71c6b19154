"""What the signs of life of a node, and its scheduler's word, say of it; with a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest

from consistency.capture.node_status import NodeStatus
from consistency.extras.operations.fleet.following import (
    FollowedNode,
    NodeLimits,
    NodeState,
    Progress,
    follow,
    lost_nodes,
)
from consistency.extras.operations.fleet.schedulers.scheduler import NodeTask, SchedulerError, Standing, TaskState

RUNNING = TaskState(standing=Standing.RUNNING)
WAITING = TaskState(standing=Standing.WAITING, reason="Resources")


def status(beat: int, phase: str = "running", **more: object) -> NodeStatus:
    return NodeStatus(beat=beat, phase=phase, stage="forward", number=5, of=9, **more)  # type: ignore[arg-type]


def followed(**limits: float) -> FollowedNode:
    return FollowedNode(limits=NodeLimits(**{"stall_s": 60.0, **limits}), started=0.0)


def test_a_node_that_beats_is_alive() -> None:
    node = followed()
    ended = TaskState(standing=Standing.ENDED, reason="its job ended: NODE_FAIL, NodeDown")
    for now in range(0, 1000, 20):
        progress = node.judge(status(now + 1), RUNNING if now < 100 else ended, float(now))
        assert progress == Progress(state=NodeState.RUNNING, text="forward, 5 of 9"), "whatever its scheduler says"
    assert node.judge(status(2000, "delivered"), ended, 1001.0).state is NodeState.DELIVERED


def test_frozen_node() -> None:
    node = followed()
    assert node.judge(status(1), RUNNING, 10.0).state is NodeState.RUNNING
    assert node.judge(status(1), RUNNING, 70.0).state is NodeState.RUNNING
    lost = node.judge(status(1), RUNNING, 71.0)
    assert lost == Progress(state=NodeState.LOST, text="no sign of life for 60 s; last stage: forward, 5 of 9")


def test_a_clock_is_not_compared_with_that_of_a_node() -> None:
    """Only a change of its status counts, and a node that starts again counts from one."""
    node = followed()
    assert node.judge(status(500), RUNNING, 50.0).state is NodeState.RUNNING
    assert node.judge(status(1), RUNNING, 105.0).state is NodeState.RUNNING
    assert node.judge(status(1), RUNNING, 160.0).state is NodeState.RUNNING


def test_node_that_starts_and_never_reports() -> None:
    node = followed()
    assert node.judge(NodeStatus(), WAITING, 500.0) == Progress(state=NodeState.WAITING, text="Resources")
    assert node.judge(NodeStatus(), RUNNING, 501.0).state is NodeState.RUNNING, "the time in the queue does not count"
    assert node.judge(NodeStatus(), RUNNING, 561.0).state is NodeState.RUNNING
    lost = node.judge(NodeStatus(), RUNNING, 562.0)
    assert lost == Progress(state=NodeState.LOST, text="no sign of life for 60 s; it had not reported yet")


def test_task_that_has_ended() -> None:
    node = followed()
    ended = TaskState(standing=Standing.ENDED, reason="its job ended: FAILED, NonZeroExitCode")
    assert node.judge(status(1), RUNNING, 1.0).state is NodeState.RUNNING
    assert not node.judge(status(1), ended, 2.0).state.is_final, "what it wrote last may arrive late"
    assert not node.judge(status(1), ended, 16.0).state.is_final
    lost = node.judge(status(1), ended, 18.0)
    assert lost.text == "its job ended: FAILED, NonZeroExitCode; last stage: forward, 5 of 9"
    assert lost.state is NodeState.LOST


def test_failure_that_a_node_reports() -> None:
    lost = followed().judge(status(3, "failed", reason="cannot write the capture"), RUNNING, 1.0)
    assert lost == Progress(state=NodeState.LOST, text="cannot write the capture")


def test_node_that_takes_no_task() -> None:
    down = TaskState(standing=Standing.DOWN, reason="drained (bad fan)")
    lost = followed().judge(NodeStatus(), down, 1.0)
    assert lost == Progress(state=NodeState.LOST, text="it takes no task: drained (bad fan)")
    assert followed().judge(status(1), down, 1.0).state is NodeState.RUNNING, "it was drained while it ran"


@pytest.mark.parametrize(
    ("task", "seen", "last"),
    [
        (RUNNING, status(7), "last stage: forward, 5 of 9"),
        (WAITING, NodeStatus(), "it was waiting (Resources)"),
        (WAITING, None, "it was waiting (Resources)"),
    ],
)
def test_late_node(task: TaskState, seen: NodeStatus | None, last: str) -> None:
    node = followed(timeout_s=100.0, stall_s=1000.0)
    assert not node.judge(seen, task, 100.0).state.is_final
    lost = node.judge(seen, task, 101.0)
    assert lost == Progress(state=NodeState.LOST, text=f"late: nothing delivered within 100 s; {last}")


class Scripted:
    """A scheduler and nodes that act by the clock: what each says at what time."""

    def __init__(self, tasks: Mapping[str, Callable[[float], TaskState]], *, dead_from: float = 1e9) -> None:
        self.now = 0.0
        self.cancelled: list[str] = []
        self._tasks = tasks
        self._dead_from = dead_from

    def nodes(self, given: str | None) -> tuple[str, ...]:  # noqa: ARG002 - the protocol's
        return tuple(self._tasks)

    def submit(self, task: NodeTask) -> None: ...

    def poll(self) -> Mapping[str, TaskState]:
        if self.now >= self._dead_from:
            raise SchedulerError("squeue: Unable to contact slurm controller")
        return {node: task(self.now) for node, task in self._tasks.items()}

    def about(self, node: str) -> str:
        return "Slurm: down*" if node == "dead" else ""

    def cancel(self, nodes: Iterable[str]) -> None:
        self.cancelled += nodes

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def follow(
        self, read: Callable[[str], NodeStatus | None], **limits: float
    ) -> tuple[dict[str, Progress], list[tuple[str, Progress]]]:
        changes: list[tuple[str, Progress]] = []
        found = follow(
            self, tuple(self._tasks), read, NodeLimits(**limits), watch=lambda *one: changes.append(one), pause_s=1.0,
            clock=lambda: self.now, sleep=self.sleep,
        )  # fmt: skip
        return found, changes


def test_a_lost_node_is_cancelled_and_the_others_go_on() -> None:
    scheduler = Scripted({"good": lambda _: RUNNING, "dead": lambda _: RUNNING})

    def read(node: str) -> NodeStatus:
        if node == "dead":
            return status(1)
        return status(int(scheduler.now), "delivered" if scheduler.now > 200 else "running")

    found, changes = scheduler.follow(read, stall_s=60.0)
    assert {node: one.state for node, one in found.items()} == {"good": NodeState.DELIVERED, "dead": NodeState.LOST}
    assert dict(lost_nodes(found)) == {"dead": "no sign of life for 60 s; last stage: forward, 5 of 9; Slurm: down*"}
    assert scheduler.cancelled == ["dead"]
    states = [(node, str(one.state)) for node, one in changes]
    expected = [("good", "running"), ("dead", "running"), ("dead", "lost"), ("good", "delivered")]
    assert states == expected, "a watcher hears of changes only"


def test_engine_that_does_not_answer() -> None:
    """Nodes that report go on without it; those that wait are given up when it has been away for long."""
    scheduler = Scripted({"runs": lambda _: RUNNING, "waits": lambda _: WAITING}, dead_from=10.0)

    def read(node: str) -> NodeStatus:
        if node == "waits":
            return NodeStatus()
        return status(int(scheduler.now), "delivered" if scheduler.now > 400 else "running")

    found, _ = scheduler.follow(read)
    assert found["runs"].state is NodeState.DELIVERED
    assert found["waits"].state is NodeState.LOST
    assert "the engine does not answer: squeue: Unable to contact" in found["waits"].text


def test_controller_that_restarts_costs_nothing() -> None:
    scheduler = Scripted({"waits": lambda now: WAITING if now < 600 else RUNNING})
    poll = scheduler.poll

    def flaky() -> Mapping[str, TaskState]:
        if 100 <= scheduler.now < 300:
            raise SchedulerError("squeue: Unable to contact slurm controller")
        return poll()

    scheduler.poll = flaky  # type: ignore[method-assign]
    found, _ = scheduler.follow(lambda _: status(9, "delivered") if scheduler.now > 650 else NodeStatus())
    assert found["waits"].state is NodeState.DELIVERED
