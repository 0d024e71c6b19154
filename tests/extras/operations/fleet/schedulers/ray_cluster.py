"""A real Ray cluster on this one machine: several `ray start`, in one folder, without its dashboard.

What a node has started is found by a variable that it inherits, so a node can die or freeze as a whole.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_DRAIN = """
import os, sys, ray
from ray.scripts.scripts import main
ray.init(log_to_driver=False)
(node,) = (one["NodeID"] for one in ray.nodes() if one["NodeName"] == sys.argv[1] and one["Alive"])
sys.argv[1:] = ["drain-node", "--address", os.environ["RAY_ADDRESS"], "--node-id", node, "--reason-message", "bad fan",
                "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", "600"]
main()
"""
"""Run by an interpreter of its own: the command knows nodes by their ids alone."""

_HOME, _NODE = "RAY_TEST_CLUSTER", "NODE"


def missing() -> str | None:
    """Return what this interpreter lacks for a cluster."""
    return None if importlib.util.find_spec("ray") else "no ray (pip install '.[fleet]')"


@dataclass(slots=True, kw_only=True)
class RayCluster:
    """A cluster with the nodes `r1` … `rN`; `r1` is its head.

    Attributes
    ----------
    given : dict
        Variables that every node gets beside its name.
    """

    engine = "ray"

    home: Path
    count: int
    given: dict[str, str] = field(default_factory=dict)
    port: int = 0
    _started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _broken: set[str] = field(default_factory=set)

    @property
    def nodes(self) -> list[str]:
        return [f"r{number}" for number in range(1, self.count + 1)]

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a process that uses this cluster."""
        return {**os.environ, "RAY_ADDRESS": f"127.0.0.1:{self.port}", "RAY_USAGE_STATS_ENABLED": "0"}

    def start(self) -> None:
        """Start one node after the other: several at once give up where the processors are few."""
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        head = ["--head", f"--port={self.port}", f"--temp-dir={self.home}", "--include-dashboard=false"]
        self._boot("r1", *head)
        for node in self.nodes[1:]:
            self._boot(node, f"--address=127.0.0.1:{self.port}")

    def kill(self, node: str) -> None:
        """Have a node die with everything on it."""
        self._broken.add(node)
        for process in self._processes(node):
            _send(process, signal.SIGKILL)
        self._started.pop(node).wait()

    def freeze(self, node: str) -> None:
        """Stop everything on a node; nothing is closed."""
        self._broken.add(node)
        for process in self._processes(node):
            _send(process, signal.SIGSTOP)

    def drain(self, node: str) -> None:
        """Let a node finish what it runs, and end then: at once, if it runs nothing."""
        self._broken.add(node)
        subprocess.run(
            [sys.executable, "-P", "-c", _DRAIN, node], env=self.environment, check=True, stdout=subprocess.DEVNULL
        )

    def mend(self) -> None:
        """Start every node again that is broken: Ray takes back none that it has given up."""
        for node in sorted(self._broken):
            for process in self._processes(node):
                _send(process, signal.SIGKILL)
            if (started := self._started.pop(node, None)) is not None:
                started.wait()
            self._boot(node, f"--address=127.0.0.1:{self.port}")
        self._broken.clear()

    def is_idle(self) -> bool:
        """Return whether no node runs this tool."""
        return not self.running("--progress=")

    def running(self, text: str) -> bool:
        """Return whether a node runs a command with this text in it."""
        for process in self._processes():
            with suppress(OSError):
                if text.encode() in Path(f"/proc/{process}/cmdline").read_bytes():
                    return True
        return False

    def stop(self) -> None:
        """End every process of the cluster."""
        for process in self._processes():
            _send(process, signal.SIGKILL)
        for started in self._started.values():
            started.wait()

    def _processes(self, node: str | None = None) -> list[int]:
        marks = {f"{_HOME}={self.home}".encode(), *(() if node is None else (f"{_NODE}={node}".encode(),))}
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if marks <= set((place / "environ").read_bytes().split(b"\0")):
                    found.append(int(place.name))
        return found

    def _boot(self, node: str, *arguments: str) -> None:
        """Start a node, and wait until it is there; one that gives up is started again."""
        command = [
            sys.executable, "-P", "-c", "from ray.scripts.scripts import main; main()", "start", "--block",
            f"--node-name={node}", "--num-cpus=1", "--object-store-memory=80000000", *arguments,
        ]  # fmt: skip
        own = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
        until = time.monotonic() + 180
        while True:
            with (self.home / f"{node}.log").open("wb") as log:
                self._started[node] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    env={**own, **self.given, _HOME: str(self.home), _NODE: node},
                )  # fmt: skip
            while self._started[node].poll() is None:
                if "Ray runtime started" in (text := (self.home / f"{node}.log").read_text()):
                    return
                assert time.monotonic() < until, text
                time.sleep(0.2)
            # Ray gives a node 30 s to come up, whatever else the machine does; what it has started may still be there
            assert time.monotonic() < until, (self.home / f"{node}.log").read_text()
            for process in self._processes(node):
                _send(process, signal.SIGKILL)


@contextmanager
def ray_cluster(nodes: int, **given: str) -> Iterator[RayCluster]:
    """Yield a cluster that runs; its folder has a short name, because those of sockets may have 107 bytes only."""
    home = Path(tempfile.mkdtemp(prefix="ray-"))
    cluster = RayCluster(home=home, count=nodes, given=given)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[RayCluster]:
    """Yield a cluster of eight nodes; a test that breaks one mends it."""
    if (lacking := missing()) is not None:
        pytest.skip(f"Ray is not installed: {lacking}")
    with ray_cluster(8) as cluster:
        yield cluster


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)
