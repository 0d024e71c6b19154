"""`consistency fleet` on a real cluster of this machine, whose nodes deliver captures that were made before."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from consistency.capture.records import TensorRecord
from consistency.case.builtin import builtin_folder
from tests.comparison.made_records import moved
from tests.conftest import command

ROOT = Path(__file__).resolve().parents[4]

STALL_S = 40
"""What ten nodes that start at once on one busy machine are never silent for."""


class Cluster(Protocol):
    """What the clusters of Slurm and Ray have in common."""

    engine: str

    @property
    def nodes(self) -> list[str]: ...

    @property
    def environment(self) -> dict[str, str]: ...

    def kill(self, node: str) -> None: ...

    def freeze(self, node: str) -> None: ...

    def drain(self, node: str) -> None: ...

    def mend(self) -> None: ...

    def is_idle(self) -> bool: ...


class Fleet:
    """The command line of a fleet.

    Attributes
    ----------
    variables : dict
        What every node has in its environment.
    """

    def __init__(self, cluster: Cluster, home: Path) -> None:
        self.cluster = cluster
        self.home = home
        self.out = home / "out"
        self.captures = home / "made"
        self.captures.mkdir()
        self.variables = {
            "NODE_CAPTURES": str(self.captures), "NODE_ADAPTER": str(builtin_folder("llama") / "adapter"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip

    def arguments(self, nodes: Sequence[str] | str | None, *more: object, faults: Mapping[str, str]) -> list[str]:
        """Return the command; `nodes` as the engine writes them, or some."""
        where = [] if nodes is None else ["--nodes", nodes if isinstance(nodes, str) else ",".join(nodes)]
        own = [f"{name}={text}" for name, text in {**self.variables, "NODE_FAULTS": json.dumps(faults)}.items()]
        node = shlex.join(["env", *own, sys.executable, "-P", f"{ROOT}/tests/extras/operations/fleet/node.py"])
        given = ["--command", node, "--level", "quick", "--devices", "cpu", "--base", "builtin:llama"]
        return command("fleet", "--engine", self.cluster.engine, *where, *given, "--out", self.out, *more)

    def start(
        self, nodes: Sequence[str] | str | None, *more: object, faults: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.arguments(nodes, *more, faults=faults or {}), env=self.cluster.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(
        self, nodes: Sequence[str] | str | None, *more: object, faults: Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        process = self.start(nodes, *more, faults=faults)
        try:
            out, errors = process.communicate(timeout=240)
        finally:
            process.send_signal(signal.SIGTERM)  # a fleet that waits for ever leaves no node to the next test
            process.wait()
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
        content = path.read_bytes() if path.exists() else b""
        return str(json.loads(content)["phase"]) if content else ""  # it is empty for a moment after it was made


def records() -> list[TensorRecord]:
    """Return enough that they do not fit in what a full disk leaves a node."""
    tables = [hashlib.sha256(str(number).encode()).hexdigest()[:32] for number in range(300)]
    more = [moved(tensor=f"t{number}", digest=one, reference_digest=one) for number, one in enumerate(tables)]
    return [moved(), *more]
