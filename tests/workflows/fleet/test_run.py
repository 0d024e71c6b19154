"""A fleet on a real Slurm cluster: nothing that happens to a node loses it, or any other."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from consistency.capture.records import TensorRecord
from consistency.capture.transport import deliver
from consistency.case.builtin import builtin_folder
from tests.comparison.made_records import moved
from tests.conftest import MakeCapture, command
from tests.launch.fleet.slurm_cluster import SlurmCluster

ROOT = Path(__file__).resolve().parents[3]
NODE = f"{shlex.quote(sys.executable)} -P {ROOT}/tests/workflows/fleet/node.py"

STALL_S = 40
"""What ten nodes that start at once on one busy machine are never silent for."""

pytestmark = pytest.mark.cluster


class Fleet:
    """The command line of a fleet whose nodes deliver captures that were made before."""

    def __init__(self, cluster: SlurmCluster, home: Path) -> None:
        self.cluster = cluster
        self.home = home
        self.out = home / "out"
        self.captures = home / "made"
        self.captures.mkdir()

    def arguments(self, nodes: str | None, *more: object) -> list[str]:
        where = [] if nodes is None else ["--nodes", nodes]
        given = ["--command", NODE, "--level", "quick", "--devices", "cpu", "--base", "builtin:llama"]
        return command("fleet", "--engine", "slurm", *where, *given, "--out", self.out, *more)

    def environment(self, faults: dict[str, str]) -> dict[str, str]:
        return self.cluster.environment | {
            "NODE_FAULTS": json.dumps(faults), "NODE_CAPTURES": str(self.captures),
            "NODE_ADAPTER": str(builtin_folder("llama") / "adapter"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip

    def start(self, nodes: str | None, *more: object, faults: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.arguments(nodes, *more), env=self.environment(faults or {}), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, nodes: str | None, *more: object, faults: dict[str, str] | None = None) -> tuple[int, str, str]:
        process = self.start(nodes, *more, faults=faults)
        out, errors = process.communicate(timeout=240)
        return process.returncode, out, errors

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "report.json").read_text(encoding="utf-8"))
        return found

    @property
    def compared(self) -> set[str]:
        return {worker["name"].partition(":")[0] for worker in self.report["workers"]}

    def reasons(self) -> dict[str, str]:
        """Return why nodes are not compared."""
        lost = [f for f in self.report["findings"] if f["kind"] in ("lost-node", "environment")]
        return {node: finding["message"] for finding in lost for node in finding["detail"]}

    def wait_for(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + 120
        while not done():
            assert time.monotonic() < until
            time.sleep(0.1)

    def reported(self, node: str) -> str:
        """Return the phase that a node has reported."""
        path = self.out / "captures" / f"{node}.json"
        return str(json.loads(path.read_bytes())["phase"]) if path.exists() else ""


def records() -> list[TensorRecord]:
    """Return enough that they do not fit in what a full disk leaves a node."""
    tables = [hashlib.sha256(str(number).encode()).hexdigest()[:32] for number in range(300)]
    more = [moved(tensor=f"t{number}", digest=one, reference_digest=one) for number, one in enumerate(tables)]
    return [moved(), *more]


@pytest.fixture
def fleet(slurm: SlurmCluster, tmp_path: Path, make_capture: MakeCapture) -> Iterator[Fleet]:
    found = Fleet(slurm, tmp_path)
    deliver(make_capture("healthy", {"cpu": records()}), str(found.captures / "any.zip"))
    yield found
    slurm.mend()


def test_flipped_bit_on_one_node(fleet: Fleet, make_capture: MakeCapture) -> None:
    """The nodes deliver to a URL."""
    flipped = make_capture("flipped", {"cpu": [moved("other bits"), *records()[1:]]})
    deliver(flipped, str(fleet.captures / "n5.zip"))
    status, out, errors = fleet.run("n[1-8]", "--store", (fleet.home / "store").as_uri())
    assert status == 1, out + errors
    found = [f for f in fleet.report["findings"] if f["severity"] == "error"]
    assert [(f["kind"], f["workers"]) for f in found] == [("bit-flip", ["n5:cpu"])]
    assert fleet.compared == {f"n{number}" for number in range(1, 9)}
    outcomes = json.loads((fleet.out / "fleet.json").read_bytes())["nodes"]
    assert [node for node, one in outcomes.items() if one["findings"]] == ["n5"]
    assert {one["state"] for one in outcomes.values()} == {"delivered"}


def test_nothing_is_lost_and_the_rest_can_be_resumed(fleet: Fleet, slurm: SlurmCluster) -> None:
    slurm.set("n9", "drain")
    slurm.kill("n10")
    slurm.set("n10", "down")
    faults = {
        "n2": "hang", "n3": "hang", "n4": "full", "n5": "software", "n6": "files", "n7": "crash", "n8": "slow"
    }  # fmt: skip
    process = fleet.start("n[1-10]", "--node-stall", STALL_S, faults=faults)
    fleet.wait_for(lambda: all(fleet.reported(node) == "running" for node in ("n2", "n3", "n8")))
    slurm.kill("n2")
    slurm.freeze("n3")
    slurm.set("n8", "drain")  # in the middle: its job goes on
    (fleet.captures / "go").touch()
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 3, out + errors
    verdict = next(line for line in out.splitlines() if "INCOMPLETE" in line)
    assert "did not finish" in verdict
    assert "n2, n3, n4" in verdict
    assert "Traceback" not in errors
    assert fleet.compared == {"n1", "n8"}
    reasons = fleet.reasons()
    expected = {
        "n2": "no sign of life", "n3": "no sign of life", "n4": "cannot write the capture",
        "n5": "peft 0.1.0, not", "n6": "the adapter is not the one of the fleet", "n7": "cannot find the interpreter",
        "n9": "drained (bad fan)", "n10": "it takes no task: down",
    }  # fmt: skip
    assert {node: text for node, text in expected.items() if text not in reasons.get(node, "")} == {}, reasons
    assert fleet.report["findings"][0]["kind"] == "environment"
    assert fleet.report["verdict"] == "incomplete"
    kept = (fleet.out / "captures" / "n1.zip").stat().st_mtime_ns

    slurm.mend()
    status, out, errors = fleet.run("n[1-10]", "--resume")
    assert status == 3, "what n5 has delivered is kept, and is still of other software"
    assert fleet.reasons().keys() == {"n5"}, errors
    assert len(fleet.compared) == 9
    assert (fleet.out / "captures" / "n1.zip").stat().st_mtime_ns == kept
    assert "n1: delivered: by the earlier run" in errors

    status, _, errors = fleet.run("n[1-10]", "--resume", "--stages", "base")
    assert status == 2
    assert "the earlier run had other options" in errors


def test_stopped_fleet_leaves_no_job(fleet: Fleet, slurm: SlurmCluster) -> None:
    process = fleet.start("n[1-3]", faults={"n2": "hang", "n3": "hang"})
    fleet.wait_for(lambda: [fleet.reported(node) for node in ("n1", "n2", "n3")] == ["delivered", "running", "running"])
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    fleet.wait_for(lambda: slurm.jobs() == [])
    assert (fleet.out / "captures" / "n1.zip").exists(), "for --resume"


def test_all_nodes_lost(fleet: Fleet) -> None:
    status, _, errors = fleet.run("n[1-2]", faults={"n1": "files", "n2": "files"})
    assert status == 3
    assert "none of 2 nodes delivered a capture" in errors
    assert "n1 · not compared: the adapter is not the one of the fleet" in errors


def test_inside_an_allocation(fleet: Fleet, slurm: SlurmCluster) -> None:
    inner = shlex.join(fleet.arguments(None, "--node-stall", STALL_S))
    log = fleet.home / "job.log"
    subprocess.run(
        ["sbatch", "--nodes=3", "--no-kill", f"--output={log}", "--wrap", f"{inner}; echo the fleet ended with $?"],
        env=fleet.environment({"n2": "hang"}), stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    fleet.wait_for(lambda: fleet.reported("n2") == "running")
    slurm.kill("n2")
    fleet.wait_for(lambda: "the fleet ended with" in log.read_text())
    assert "the fleet ended with 3" in log.read_text()
    assert fleet.compared == {"n1", "n3"}
    assert any(text in fleet.reasons()["n2"] for text in ("no sign of life", "Node failure on n2"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--nodes", "n[1-2],gpu7"), "no such node"),
        (("--nodes", "n1", "--partition", "nowhere"), "no such partition"),
        (("--nodes", "n1", "--gpus", "8"), "Slurm refuses"),
        ((), "which nodes?"),
    ],
)
def test_refused_before_anything_starts(fleet: Fleet, arguments: tuple[str, ...], text: str) -> None:
    status, _, errors = fleet.run(None, *arguments)
    assert status == 2
    assert text in errors
    assert fleet.cluster.jobs() == []
    assert not fleet.out.exists()


def test_real_captures(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The whole way, without a stand-in for the workers."""
    done = subprocess.run(
        command("fleet", "--engine", "slurm", "--nodes", "n[1-2]", "--level", "quick", "--stages", "base,adapter",
                "--devices", "cpu", "--out", tmp_path / "out"),
        env=slurm.environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "base and adapter match on 2 workers" in done.stdout
    assert "n1: running: " in done.stderr
    shutil.rmtree(tmp_path / "out")
