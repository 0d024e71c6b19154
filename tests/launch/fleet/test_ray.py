"""Ray's tasks, on a real cluster of this machine: bound to their node, never repeated, and ended with it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from consistency.capture.transport import deliver
from consistency.errors import UsageError
from consistency.launch.fleet.engine import FleetEngine, NodeTask, Standing, fleet_engine
from consistency.launch.fleet.options import FleetOptions
from tests.comparison.made_records import moved
from tests.conftest import MakeCapture, command
from tests.launch.fleet.ray_cluster import RayCluster, missing, ray_cluster

ROOT = Path(__file__).resolve().parents[3]
NODE = f"{shlex.quote(sys.executable)} -P {ROOT}/tests/workflows/fleet/node.py"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(missing() is not None, reason=f"Ray is not installed: {missing()}"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    captures = tmp_path_factory.mktemp("made")
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with ray_cluster(3, NODE_CAPTURES=str(captures), NODE_FAULTS='{"r2": "hang"}', PYTHONPATH=python_path) as found:
        yield found


@pytest.fixture
def engine(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetEngine]:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", cluster.environment["RAY_ADDRESS"])
    yield fleet_engine(FleetOptions(engine="ray"))
    ray.shutdown()


def wait_for(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not done():
        assert time.monotonic() < until
        time.sleep(0.2)


@pytest.mark.filterwarnings("ignore")  # Ray leaves sockets and processes to its own end
def test_tasks(engine: FleetEngine, cluster: RayCluster, tmp_path: Path) -> None:
    assert engine.nodes("all") == ("r1", "r2", "r3")
    assert engine.nodes("r3, r1,r3") == ("r3", "r1")
    with pytest.raises(UsageError, match="no such node"):
        engine.nodes("r1,r9")

    def submit(node: str, program: str) -> None:
        engine.submit(NodeTask(node=node, command=["sh", "-c", program], log=tmp_path / node))

    submit("r1", "echo $NODE; exit 7")
    submit("r2", "sleep 3141")
    wait_for(lambda: engine.poll()["r1"].standing is Standing.ENDED)
    assert engine.poll()["r1"].reason == "its task ended: exit status 7"
    assert (tmp_path / "r1").read_text() == "r1\n", "it ran where it was to, once"
    wait_for(lambda: cluster.running("sleep\x003141"))
    engine.cancel(["r1", "r2"])
    wait_for(lambda: not cluster.running("sleep\x003141"))
    assert engine.poll()["r2"].standing is Standing.ENDED


def test_fleet_with_a_node_that_dies(cluster: RayCluster, tmp_path: Path, make_capture: MakeCapture) -> None:
    deliver(make_capture("healthy", {"cpu": [moved()]}), f"{cluster.given['NODE_CAPTURES']}/any.zip")
    out = tmp_path / "out"
    process = subprocess.Popen(
        command("fleet", "--engine", "ray", "--nodes", "r1,r2,r3", "--command", NODE, "--level", "quick", "--devices",
                "cpu", "--base", "builtin:llama", "--out", out, "--node-stall", 40),
        env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    status = out / "captures" / "r2.json"
    wait_for(lambda: status.exists() and b'"running"' in status.read_bytes())
    cluster.kill("r2")
    text, errors = process.communicate(timeout=240)
    assert process.returncode == 3, text + errors
    assert "r2 did not finish" in text
    assert "r1:cpu (reference)  r3:cpu" in text
    assert "Traceback" not in errors
