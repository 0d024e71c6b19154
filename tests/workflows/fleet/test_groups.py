"""A fleet whose nodes form one group of ranks each: nodes of this machine, each a process with a group of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.requirements import requirements_of
from consistency.case.stages import Level, Stage
from consistency.devices.discovery import discover
from consistency.launch.fleet.engine import NodeTask, Standing, TaskState
from consistency.launch.fleet.options import FleetOptions
from consistency.workflows.fleet.run import FleetPlan, run_fleet

KERNELS = [info.spec.name for info in discover() if info.spec.is_cpu]


class Processes:
    """An engine that starts every node's task at once on this machine."""

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


@pytest.mark.process
@pytest.mark.skipif(len(KERNELS) < 2, reason="this processor has one kernel variant: there is no group")
def test_every_node_has_a_group_of_its_own(tmp_path: Path) -> None:
    case = Options(stages=(Stage.COLLECTIVES,), devices=("cpu", "cpu@baseline"), level=Level.QUICK)
    engine = Processes()
    plan = FleetPlan(
        engine=engine,
        options=FleetOptions(engine="slurm", node_stall=120.0),
        nodes=("n1", "n2"),
        command=(sys.executable, "-P", "-m", "consistency"),
        words=("--stages", "collectives", "--level", "quick", "--devices", "cpu,cpu@baseline"),
        requirements=requirements_of(prepare_case(case)),
    )
    found = run_fleet(plan, tmp_path / "out", watch=lambda *_: None)
    engine.cancel(plan.nodes)  # what has delivered its capture may take a moment to end
    assert found.verdict == "consistent"
    assert [worker.name for worker in found.workers] == ["n1:cpu", "n1:cpu@baseline", "n2:cpu", "n2:cpu@baseline"]
    groups = {
        tuple(row.evidence["ranks"]) for tensor in found.tensors for row in tensor.outcomes if "ranks" in row.evidence
    }
    assert groups == {("cpu", "cpu@baseline")}
    assert {row.status for tensor in found.tensors for row in tensor.outcomes} == {"equal", "within", "skipped"}
