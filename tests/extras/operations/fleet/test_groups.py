"""A fleet whose nodes form one group of ranks each: nodes of this machine, each a process with a group of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from consistency.case import standard
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.requirements import requirements_of
from consistency.case.stage import Level, Stage
from consistency.comparison.result import Comparison
from consistency.devices.discovery import discover
from consistency.extras.operations.fleet.run import FleetPlan, run_fleet
from consistency.extras.operations.fleet.schedulers.options import FleetOptions
from consistency.extras.operations.fleet.schedulers.scheduler import NodeTask, Standing, TaskState
from consistency.extras.training.collectives.spec import COLLECTIVES
from consistency.extras.training.replicas.spec import REPLICAS

KERNELS = [info.spec.name for info in discover() if info.spec.is_cpu]


class Processes:
    """A scheduler that starts every node's task at once on this machine."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def nodes(self, given: str | None) -> tuple[str, ...]:
        return tuple((given or "").split(","))

    def submit(self, task: NodeTask) -> None:
        assert task.log is not None
        with task.log.open("wb") as log:
            self._running[task.node] = subprocess.Popen(list(task.command), stdout=log, stderr=subprocess.STDOUT)

    def poll(self) -> Mapping[str, TaskState]:
        ended = {node: process.poll() is not None for node, process in self._running.items()}
        return {node: TaskState(standing=Standing.ENDED if end else Standing.RUNNING) for node, end in ended.items()}

    def about(self, node: str) -> str:
        return "" if node in self._running else "it was never started"

    def cancel(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            if node in self._running:
                self._running[node].kill()
                self._running[node].wait()


class OneNodeIsDown(Processes):
    """The same, and the last node takes no task."""

    def submit(self, task: NodeTask) -> None:
        if task.node != "n2":
            super().submit(task)

    def poll(self) -> Mapping[str, TaskState]:
        return {**super().poll(), "n2": TaskState(standing=Standing.DOWN, reason="it is drained")}


def fleet(scheduler: Processes, out: Path, *stages: Stage, together: bool = False) -> Comparison:
    case = Options(stages=stages, devices=("cpu", "cpu@baseline"), level=Level.QUICK)
    plan = FleetPlan(
        scheduler=scheduler,
        options=FleetOptions(engine="slurm", node_stall=120.0, together=together),
        nodes=("n1", "n2"),
        command=(sys.executable, "-P", "-m", "consistency"),
        words=("--stages", ",".join(stages), "--level", "quick", "--devices", "cpu,cpu@baseline"),
        requirements=requirements_of(prepare_case(case)),
    )
    try:
        return run_fleet(plan, out, watch=lambda *_: None)
    finally:
        scheduler.cancel(plan.nodes)  # what has delivered its capture may take a moment to end


def groups(found: Comparison) -> set[tuple[str, ...]]:
    rows = [row for tensor in found.tensors for row in tensor.outcomes]
    return {tuple(row.evidence["ranks"]) for row in rows if "ranks" in row.evidence}


pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(len(KERNELS) < 2, reason="this processor has one kernel variant: there is no group"),
]


@pytest.mark.slow
def test_every_node_has_a_group_of_its_own(tmp_path: Path) -> None:
    found = fleet(Processes(), tmp_path / "out", COLLECTIVES)
    assert found.verdict == "consistent"
    assert [worker.name for worker in found.workers] == ["n1:cpu", "n1:cpu@baseline", "n2:cpu", "n2:cpu@baseline"]
    assert groups(found) == {("cpu", "cpu@baseline")}
    assert {row.status for tensor in found.tensors for row in tensor.outcomes} == {"equal", "within", "skipped"}


@pytest.mark.slow
def test_the_devices_of_all_nodes_form_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # both nodes are this machine, whose name may have no address
    found = fleet(Processes(), tmp_path / "out", COLLECTIVES, REPLICAS, together=True)
    assert found.verdict == "consistent", [finding.message for finding in found.findings]
    ranks = ("n1:cpu", "n1:cpu@baseline", "n2:cpu", "n2:cpu@baseline")
    assert ranks in groups(found)
    names = {tensor.tensor.partition(" of ")[2] for tensor in found.tensors if tensor.stage == REPLICAS}
    assert "4 ranks" in names
    assert not (tmp_path / "out" / "captures" / "together").exists()


@pytest.mark.slow
def test_a_node_that_never_comes_is_named_by_the_others(tmp_path: Path) -> None:
    found = fleet(OneNodeIsDown(), tmp_path / "out", COLLECTIVES, standard.OPERATORS, together=True)
    assert found.verdict == "incomplete"
    (skipped,) = (f.message for f in found.findings if f.kind == "skipped" and f.message.startswith("collectives"))
    assert "node n2 was lost: it takes no task: it is drained" in skipped
    assert any(tensor.stage == standard.OPERATORS for tensor in found.tensors), "what needs no group is kept"
