"""Ray's tasks, on a real cluster of this machine: bound to their node, never repeated, and ended with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from consistency.errors import UsageError
from consistency.extras.operations.fleet.schedulers.options import FleetOptions
from consistency.extras.operations.fleet.schedulers.scheduler import (
    FleetScheduler,
    NodeTask,
    Standing,
    connect_scheduler,
)
from tests.extras.operations.fleet.schedulers.ray_cluster import RayCluster

pytestmark = pytest.mark.cluster


@pytest.fixture
def scheduler(ray_nodes: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetScheduler]:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", ray_nodes.environment["RAY_ADDRESS"])
    yield connect_scheduler(FleetOptions(engine="ray"))
    ray.shutdown()


def wait_for(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not done():
        assert time.monotonic() < until
        time.sleep(0.2)


@pytest.mark.filterwarnings("ignore")  # Ray leaves sockets and processes to its own end
def test_tasks(scheduler: FleetScheduler, ray_nodes: RayCluster, tmp_path: Path) -> None:
    assert scheduler.nodes("all") == tuple(ray_nodes.nodes)
    assert scheduler.nodes("r3, r1,r3") == ("r3", "r1")
    with pytest.raises(UsageError, match="no such node"):
        scheduler.nodes("r1,r9")

    def submit(node: str, program: str) -> None:
        scheduler.submit(NodeTask(node=node, command=["sh", "-c", program], log=tmp_path / node))

    submit("r1", "echo $NODE; exit 7")
    submit("r2", "sleep 3141")
    wait_for(lambda: scheduler.poll()["r1"].standing is Standing.ENDED)
    assert scheduler.poll()["r1"].reason == "its task ended: exit status 7"
    assert (tmp_path / "r1").read_text() == "r1\n", "it ran where it was to, once"
    wait_for(lambda: ray_nodes.running("sleep\x003141"))
    scheduler.cancel(["r1", "r2"])
    wait_for(lambda: not ray_nodes.running("sleep\x003141"))
    assert scheduler.poll()["r2"].standing is Standing.ENDED
