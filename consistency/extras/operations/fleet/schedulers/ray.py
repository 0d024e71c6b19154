"""Ray: one task per node, bound to it, and never repeated.

A retry would hide the fault that a fleet is there to find, and a task that may run elsewhere would check another node.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from consistency.devices.backends import BACKENDS
from consistency.devices.interpreter import python_path
from consistency.errors import UsageError, extra_hint, first_line
from consistency.extras.operations.fleet.schedulers.engine import EngineError, NodeTask, Standing, TaskState
from consistency.extras.operations.fleet.schedulers.options import FleetOptions

_CANCEL_S = 10.0  # a task that was cancelled ends its process, which ends its workers

_VISIBILITY = ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", *filter(None, (b.visibility for b in BACKENDS.values()))]
"""Variables that Ray may set to nothing for a task that requests no accelerator, which hides all of them from it."""


class RayEngine:
    """Run tasks on the nodes of the Ray cluster that this host belongs to, or that `RAY_ADDRESS` names."""

    def __init__(self, options: FleetOptions) -> None:
        for name in ("partition", "account", "engine_args"):
            if getattr(options, name):
                raise UsageError(f"--{name.replace('_', '-')} is not supported with Ray", where="--engine ray")
        try:
            import ray
        except ImportError:
            hint = extra_hint("fleet")
            raise UsageError("Ray is not installed", where="--engine ray", hint=hint) from None
        self._ray = ray
        self._options = options
        self._tasks: dict[str, Any] = {}
        self._ended: dict[str, str] = {}

    def nodes(self, given: str | None) -> tuple[str, ...]:
        try:
            self._ray.init(
                address="auto",
                log_to_driver=False,
                logging_level="error",
                configure_logging=False,
                ignore_reinit_error=True,
            )
        except (ConnectionError, RuntimeError) as error:
            raise UsageError(
                "there is no Ray cluster",
                where="--engine ray",
                got=first_line(error),
                hint="run it on a node of the cluster, or set RAY_ADDRESS",
            ) from None
        known = self._known()
        if given in (None, "all"):
            return tuple(sorted(name for name, node in known.items() if node["Alive"]))
        assert given is not None
        names = tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
        strangers = [name for name in names if name not in known]
        if strangers or not names:
            raise UsageError("no such node", where="--nodes", got=" ".join(strangers[:6]), wanted=", ".join(known))
        return names

    def submit(self, task: NodeTask) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self._known()[task.node]
        if not node["Alive"]:
            self._ended[task.node] = _death(node)
            return
        resources = node["Resources"]
        remote = self._ray.remote(
            max_retries=0,
            max_calls=1,  # a process of its own
            num_cpus=resources.get("CPU", 0) if self._options.exclusive else 0,
            num_gpus=self._options.gpus or 0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False),
        )(_program())
        log = None if task.log is None else str(task.log)
        hidden = [] if self._options.gpus else _VISIBILITY
        self._tasks[task.node] = remote.remote(list(task.command), os.getcwd(), log, python_path(), hidden)

    def poll(self) -> Mapping[str, TaskState]:
        try:
            known = self._known()
            over, _ = self._ray.wait(list(self._tasks.values()), num_returns=len(self._tasks), timeout=0)
        except Exception as error:  # Ray raises kinds of several modules
            raise EngineError(f"Ray: {first_line(error)}") from None
        for node, task in self._tasks.items():
            if task in over and node not in self._ended:
                self._ended[node] = self._outcome(task)
            elif node not in self._ended and not known[node]["Alive"]:
                self._ended[node] = _death(known[node])
        waiting = TaskState(standing=Standing.WAITING)
        ended = {node: TaskState(standing=Standing.ENDED, reason=reason) for node, reason in self._ended.items()}
        return {**dict.fromkeys(self._tasks, waiting), **ended}

    def about(self, node: str) -> str:
        try:
            found = self._known().get(node)
        except Exception as error:  # as above
            return f"Ray: {first_line(error)}"
        return "" if found is None else f"Ray: node is {'alive' if found['Alive'] else 'dead'}"

    def cancel(self, nodes: Iterable[str]) -> None:
        tasks = [self._tasks[node] for node in nodes if node in self._tasks and node not in self._ended]
        for task in tasks:
            self._ray.cancel(task, force=False)  # it ends its process, then itself
        if tasks:
            _, left = self._ray.wait(tasks, num_returns=len(tasks), timeout=_CANCEL_S)
            for task in left:
                self._ray.cancel(task, force=True)  # its process gets SIGTERM when its parent dies

    def _outcome(self, task: Any) -> str:
        try:
            return f"its task ended: exit status {self._ray.get(task)}"
        except Exception as error:  # as above
            return f"its task ended: {first_line(error)}"

    def _known(self) -> dict[str, dict[str, Any]]:
        """Return the nodes by name: the one that they were started with, else the host's, else the address."""
        found: dict[str, dict[str, Any]] = {}
        nodes = sorted(self._ray.nodes(), key=lambda node: node["Alive"])  # of one name, the one that is alive
        hosts = [node["NodeManagerHostname"] for node in nodes if node["Alive"]]
        for node in nodes:
            name, host, address = node["NodeName"], node["NodeManagerHostname"], node["NodeManagerAddress"]
            found[name if name not in ("", address) else host if hosts.count(host) < 2 else address] = node
        return found


def _death(node: Mapping[str, Any]) -> str:
    """Return that a node is dead, and why: a drained one ends as soon as it runs nothing."""
    why = " ".join(str(node.get("DeathReasonMessage") or "").split())[:200]
    return f"its node is dead ({why})" if why else "its node is dead"


def _program() -> Any:
    """Return what a task does; a function within a function travels as code, so a node needs no tool to receive it."""

    def run(command: list[str], folder: str, log: str | None, path: dict[str, str], hidden: list[str]) -> int:
        import ctypes
        import os
        import pathlib
        import signal
        import subprocess
        import time

        environment = {**os.environ, **path}
        for name in hidden:
            if environment.get(name) == "":
                del environment[name]

        def die_with_parent() -> None:
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

        with pathlib.Path(log or os.devnull).open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )
            try:
                while process.poll() is None:  # a wait would not be interrupted when Ray cancels the task
                    time.sleep(0.2)
                return process.returncode
            finally:
                if process.poll() is None:
                    process.terminate()
                    try:
                        process.wait(5)
                    except subprocess.TimeoutExpired:
                        process.kill()

    return run
