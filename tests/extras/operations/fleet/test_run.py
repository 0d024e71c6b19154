"""A fleet on real clusters of Slurm and Ray: nothing that happens to a node loses it, or any other."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from consistency.capture.transport import deliver
from consistency.extras.operations.history.store import History
from tests.accelerator.fixtures import Double
from tests.comparison.made_records import moved
from tests.conftest import MakeCapture, command
from tests.extras.operations.fleet.on_a_cluster import STALL_S, Cluster, Fleet, records
from tests.extras.operations.fleet.schedulers.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.cluster


CLUSTERS = ("slurm", "ray_nodes")


@pytest.fixture(params=CLUSTERS)
def cluster(request: pytest.FixtureRequest) -> Cluster:
    found: Cluster = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def fleet(cluster: Cluster, tmp_path: Path, make_capture: MakeCapture) -> Iterator[Fleet]:
    found = Fleet(cluster, tmp_path)
    deliver(make_capture("healthy", {"cpu": records()}), str(found.captures / "any.zip"))
    yield found
    cluster.mend()


slurm_alone = pytest.mark.parametrize("cluster", CLUSTERS[:1], indirect=True)
"""For what only Slurm has."""


def test_flipped_bit_on_one_node(fleet: Fleet, make_capture: MakeCapture) -> None:
    """The nodes deliver to a URL."""
    nodes = fleet.cluster.nodes[:8]
    flipped = make_capture("flipped", {"cpu": [moved("other bits"), *records()[1:]]})
    deliver(flipped, str(fleet.captures / f"{nodes[4]}.zip"))
    history = fleet.home / "history"
    status, out, errors = fleet.run(nodes, "--store", (fleet.home / "store").as_uri(), "--history", history)
    assert status == 1, out + errors
    found = [f for f in fleet.report["findings"] if f["severity"] == "error"]
    assert [(f["kind"], f["workers"]) for f in found] == [("bit-flip", [f"{nodes[4]}:cpu"])]
    assert fleet.compared == set(nodes)
    outcomes = json.loads((fleet.out / "fleet.json").read_bytes())["nodes"]
    assert [node for node, one in outcomes.items() if one["findings"]] == [nodes[4]]
    assert {one["state"] for one in outcomes.values()} == {"delivered"}
    (run,) = History(str(history)).runs()
    assert {worker.name: worker.verdict for worker in run.workers if worker.verdict != "consistent"} == {
        f"{nodes[4]}:cpu": "inconsistent"
    }
    assert len({worker.device for worker in run.workers}) == 8


def test_nothing_is_lost_and_the_rest_can_be_resumed(fleet: Fleet) -> None:
    cluster = fleet.cluster
    healthy, killed, frozen, full, other, files, drained, slow, *more = cluster.nodes
    faults = {killed: "hang", frozen: "hang", full: "full", other: "software", files: "files", slow: "slow"}
    expected = {full: "cannot write the capture", other: "peft 0.1.0, not"}
    expected[files] = "the adapter is not the one of the fleet"
    cluster.drain(drained)
    if isinstance(cluster, SlurmCluster):
        crashed, down = more
        cluster.kill(down)
        cluster.set(down, "down")
        faults[crashed] = "crash"
        expected |= {
            crashed: "cannot find the interpreter",
            down: "it takes no task: down",
            drained: "drained (bad fan)",
        }
        expected |= {killed: "no sign of life", frozen: "no sign of life"}
    else:  # Ray soon takes a node that is silent for a dead one
        expected |= {drained: "its node is dead (bad fan)", frozen: "last stage: base"}
    process = fleet.start(cluster.nodes, "--node-stall", STALL_S, faults=faults)
    fleet.wait_for(lambda: all(fleet.reported(node) == "running" for node in (killed, frozen, slow)))
    cluster.kill(killed)
    cluster.freeze(frozen)
    cluster.drain(slow)  # in the middle: its task goes on
    (fleet.captures / "go").touch()
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 3, out + errors
    verdict = next(line for line in out.splitlines() if "INCOMPLETE" in line)
    assert "did not finish" in verdict
    assert f"{killed}, {frozen}, {full}" in verdict
    assert "Traceback" not in errors
    assert fleet.compared == {healthy, slow}
    reasons = fleet.reasons()
    assert {node: text for node, text in expected.items() if text not in reasons.get(node, "")} == {}, reasons
    # a task of Ray's that is told to stop before its node dies may still say so
    assert any(text in reasons[killed] for text in ("no sign of life", "last stage: base", "told to stop")), reasons
    assert fleet.report["findings"][0]["kind"] == "environment"
    assert fleet.report["verdict"] == "incomplete"
    kept = (fleet.out / "captures" / f"{healthy}.zip").stat().st_mtime_ns

    cluster.mend()
    status, out, errors = fleet.run(cluster.nodes, "--resume")
    assert status == 3, "what a node of other software has delivered is kept, and is still of other software"
    assert fleet.reasons().keys() == {other}, errors
    assert fleet.compared == {*cluster.nodes} - {other}
    assert (fleet.out / "captures" / f"{healthy}.zip").stat().st_mtime_ns == kept
    assert f"{healthy}: delivered: by the earlier run" in errors

    status, _, errors = fleet.run(cluster.nodes, "--resume", "--stages", "base")
    assert status == 2
    assert "the earlier run had other options" in errors


def test_stopped_fleet_leaves_no_task_and_late_nodes_are_named(fleet: Fleet) -> None:
    nodes = first, *rest = fleet.cluster.nodes[:3]
    faults = dict.fromkeys(rest, "hang")
    process = fleet.start(nodes, faults=faults)
    fleet.wait_for(lambda: [fleet.reported(node) for node in nodes] == ["delivered", "running", "running"])
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    fleet.wait_for(fleet.cluster.is_idle)
    assert (fleet.out / "captures" / f"{first}.zip").exists(), "for --resume"

    status, out, errors = fleet.run(nodes, "--resume", "--node-timeout", "10s", faults=faults)
    assert status == 3, out + errors
    reasons = fleet.reasons()
    assert reasons.keys() == set(rest), "what the first had delivered is kept, and no node too many is late"
    assert all("late: nothing delivered within 10 s" in text for text in reasons.values()), reasons
    fleet.wait_for(fleet.cluster.is_idle)


def test_node_without_accelerator(fleet: Fleet, double: Double) -> None:
    nodes = *_, bare = fleet.cluster.nodes[:3]
    settings = double.environment()
    fleet.variables |= {name: settings[name] for name in ("CONSISTENCY_DOUBLE", "CUDA_VISIBLE_DEVICES")}
    fleet.variables["PYTHONPATH"] += f":{double.folder}"
    status, out, errors = fleet.run(nodes, "--devices", "auto", faults={bare: "bare"})
    assert status == 3, out + errors
    assert fleet.compared == {*nodes} - {bare}
    assert "no accelerator, but 2 other nodes of the fleet have one" in fleet.reasons()[bare]


def test_all_nodes_lost(fleet: Fleet) -> None:
    nodes = one, other = fleet.cluster.nodes[:2]
    status, _, errors = fleet.run(nodes, faults={one: "files", other: "files"})
    assert status == 3
    assert "none of 2 nodes delivered a capture" in errors
    assert f"{one} · not compared: the adapter is not the one of the fleet" in errors


@pytest.mark.process
@slurm_alone
def test_inside_an_allocation(fleet: Fleet) -> None:
    inner = shlex.join(fleet.arguments(None, "--node-stall", STALL_S, faults={"n2": "hang"}))
    log = fleet.home / "job.log"
    subprocess.run(
        ["sbatch", "--nodes=3", "--no-kill", f"--output={log}", "--wrap", f"{inner}; echo the fleet ended with $?"],
        env=fleet.cluster.environment, stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    fleet.wait_for(lambda: fleet.reported("n2") == "running")
    fleet.cluster.kill("n2")
    fleet.wait_for(lambda: "the fleet ended with" in log.read_text())
    assert "the fleet ended with 3" in log.read_text()
    assert fleet.compared == {"n1", "n3"}
    assert any(text in fleet.reasons()["n2"] for text in ("no sign of life", "Node failure on n2"))


@slurm_alone
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--nodes", "n[1-2],gpu7"), "no such node"),
        (("--nodes", "n1", "--partition", "nowhere"), "no such partition"),
        (("--nodes", "n1", "--gpus", "8"), "Slurm refuses"),
        ((), "--nodes is required outside a Slurm allocation"),
    ],
)
def test_refused_before_anything_starts(fleet: Fleet, arguments: tuple[str, ...], text: str) -> None:
    status, _, errors = fleet.run(None, *arguments)
    assert status == 2
    assert text in errors
    assert fleet.cluster.is_idle()
    assert not fleet.out.exists()


@pytest.mark.process
def test_real_captures(cluster: Cluster, tmp_path: Path) -> None:
    """The whole way, without a stand-in for the workers."""
    nodes = cluster.nodes[:2]
    done = subprocess.run(
        command("fleet", "--engine", cluster.engine, "--nodes", ",".join(nodes), "--level", "quick", "--stages",
                "base,adapter", "--devices", "cpu", "--out", tmp_path / "out"),
        env=cluster.environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "base and adapter agree on 2 workers" in done.stdout
    assert f"{nodes[0]}: running: " in done.stderr
    shutil.rmtree(tmp_path / "out")
