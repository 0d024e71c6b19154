"""A real Slurm cluster on this one machine: a controller and several `slurmd`, as one user, in one folder.

    python -m tests.extras.operations.fleet.schedulers.slurm_cluster --nodes 8 -- bash

runs a command with it, and ends it with the command. On Debian: `apt-get install slurm-wlm munge`. What a node has
started is found by the environment that Slurm gives it, so a node can die or freeze as a whole, as a machine does.
"""

from __future__ import annotations

import argparse
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

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue")
_SYSTEM = "/usr/sbin:/sbin"

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/ctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=300
KillWait=2
UnkillableStepTimeout=5
MessageTimeout=5
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=1 RealMemory=1000
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP
PartitionName=other Nodes=n[1-2] MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return what this machine lacks for a cluster."""
    lacking = [name for name in PROGRAMS if _program(name) is None]
    return f"no {', '.join(lacking)} (Debian: slurm-wlm, munge)" if lacking else None


@dataclass(slots=True, kw_only=True)
class SlurmCluster:
    """A cluster with the nodes `n1` … `nN`."""

    engine = "slurm"

    home: Path
    count: int
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.count + 1)]

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a process that uses this cluster, and is in no job."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SALLOC"))}
        path = f"{os.environ.get('PATH', '')}:{_SYSTEM}"
        return {**own, "SLURM_CONF": str(self.home / "slurm.conf"), "PATH": path}

    def start(self) -> None:
        """Start everything, and wait until every node is idle."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o755)  # munged refuses a socket in a folder that others may write to
        (self.home / "state").mkdir(exist_ok=True)
        key = self.home / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        ports = _free_ports(self.count + 1)
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        text = _CONFIGURATION.format(
            home=self.home, host=socket.gethostname().partition(".")[0], user=user, nodes=self.count, port=ports[0],
            first=ports[1], last=ports[-1],
        )  # fmt: skip
        (self.home / "slurm.conf").write_text(text)
        munge = [f"--{name}={self.home}/{file}" for name, file in (
            ("key-file", "munge.key"), ("socket", "munge.socket"), ("log-file", "munge.log"), ("pid-file", "munge.pid"),
            ("seed-file", "munge.seed"),
        )]  # fmt: skip
        self._daemon("munged", "--foreground", "--force", *munge)
        _wait(lambda: (self.home / "munge.socket").exists(), "munged to listen")
        self._daemon("slurmctld", "-D")
        for node in self.nodes:
            self.boot(node)
        _wait(lambda: all(self.state(node) == "idle" for node in self.nodes), "every node to be idle")

    def boot(self, node: str) -> None:
        """Start a node, also one that has died."""
        (self.home / f"spool-{node}").mkdir(exist_ok=True)
        self._daemon(f"slurmd-{node}", "-D", "-N", node)

    def kill(self, node: str) -> None:
        """Have a node die with everything on it."""
        self._signal(node, signal.SIGKILL)
        self._daemons.pop(f"slurmd-{node}").wait()

    def freeze(self, node: str) -> None:
        """Stop everything on a node; nothing is closed."""
        self._signal(node, signal.SIGSTOP)

    def thaw(self, node: str) -> None:
        self._signal(node, signal.SIGCONT)

    def mend(self) -> None:
        """Bring every node back."""
        for node in self.nodes:
            self.thaw(node)
            if self._daemons.get(f"slurmd-{node}") is None:
                self.boot(node)
            if not self.state(node).startswith(("idle", "alloc", "mix")):
                self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        _wait(lambda: all(self.state(node) == "idle" for node in self.nodes), "every node to be idle")

    def set(self, node: str, state: str) -> None:
        """Set the state of a node, as an administrator does: `drain`, `down`, `resume`."""
        self.run("scontrol", "update", f"nodename={node}", f"state={state}", "reason=bad fan")

    def drain(self, node: str) -> None:
        """Let a node finish what it runs, and take nothing more."""
        self.set(node, "drain")

    def is_idle(self) -> bool:
        """Return whether no job waits or runs."""
        return self.jobs() == []

    def state(self, node: str) -> str:
        return self.run("sinfo", "-h", "-N", "-p", "main", "-n", node, "-o", "%T", check=False).stdout.strip()

    def jobs(self) -> list[str]:
        """Return the jobs that wait or run."""
        return self.run("squeue", "-h", "-t", "PD,R,CG", "-o", "%i %T").stdout.splitlines()

    def run(self, *command: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command that uses this cluster."""
        return subprocess.run(
            list(map(str, command)), env=self.environment, capture_output=True, text=True, check=check, timeout=120
        )

    def processes(self, node: str | None = None) -> list[int]:
        """Return what the nodes have started, or one of them, and the daemons that watch over it."""
        marks = {f"SLURM_CONF={self.home}/slurm.conf".encode()}
        marks |= set() if node is None else {f"SLURMD_NODENAME={node}".encode()}
        found: dict[int, None] = {}
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                if marks <= set((place / "environ").read_bytes().split(b"\0")):
                    if b"slurmd" not in (place / "comm").read_bytes():
                        found[int(place.name)] = None
                    parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                    if b"slurmstepd" in Path("/proc", str(parent), "comm").read_bytes():
                        found[parent] = None
        return list(found)

    def stop(self) -> None:
        """End every process of the cluster."""
        for number in [*self.processes(), *(daemon.pid for daemon in self._daemons.values())]:
            if number != os.getpid():
                _send(number, signal.SIGKILL)
        for daemon in self._daemons.values():
            daemon.wait()
        self._daemons.clear()

    def _signal(self, node: str, number: signal.Signals) -> None:
        daemon = self._daemons.get(f"slurmd-{node}")
        for process in [*([] if daemon is None else [daemon.pid]), *self.processes(node)]:
            _send(process, number)

    def _daemon(self, name: str, *arguments: str) -> None:
        program = _program(name.partition("-")[0])
        assert program is not None
        with (self.home / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [program, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment,
                start_new_session=True,  # Ctrl-C is for the tool that runs on the cluster
            )  # fmt: skip


@contextmanager
def slurm_cluster(nodes: int) -> Iterator[SlurmCluster]:
    """Yield a cluster that runs; its folder has a short name, because that of a socket may have 107 bytes only."""
    home = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = SlurmCluster(home=home, count=nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Yield a cluster of ten nodes; a test that breaks one mends it."""
    if (lacking := missing()) is not None:
        pytest.skip(f"Slurm is not installed: {lacking}")
    with slurm_cluster(10) as cluster:
        yield cluster


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_SYSTEM)


def _free_ports(count: int) -> list[int]:
    """Return ports in a row, as Slurm wants those of its nodes."""
    for first in range(20_000 + os.getpid() % 9000, 60_000, count):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
            return list(range(first, first + count))
    raise RuntimeError("no free ports in a row")


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _wait(done: object, what: str, limit_s: float = 60.0) -> None:
    assert callable(done)
    until = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        time.sleep(0.1)


def main() -> int:
    """Run a command with a cluster."""
    parser = argparse.ArgumentParser(description="Run a command with a Slurm cluster on this machine.")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("command", nargs="+")
    parsed = parser.parse_args()
    with slurm_cluster(parsed.nodes) as cluster:
        return subprocess.run(parsed.command, env=cluster.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
