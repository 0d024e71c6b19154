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
from consistency.extras.operations.fleet.schedulers.options import FleetOptions
from consistency.extras.operations.fleet.schedulers.scheduler import NodeTask, SchedulerError, Standing, TaskState

_CANCEL_S = 10.0  # a task that was cancelled ends its process, which ends its workers
_MOST_UNKNOWN = 6  # unknown names in an error
_MOST_REASON = 200  # characters of the reason of a node's death

_VISIBILITY = ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", *filter(None, (b.visibility for b in BACKENDS.values()))]
"""Variables that Ray may set to nothing for a task that requests no accelerator, which hides all of them from it."""


class RayScheduler:
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
        self._tasks: dict[str, Any] = {}  # Ray's tasks by node
        self._end_reasons: dict[str, str] = {}  # how tasks have ended, by node

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
        cluster_nodes = self._cluster_nodes()
        if given in (None, "all"):
            return tuple(sorted(name for name, node in cluster_nodes.items() if node["Alive"]))
        assert given is not None
        words = (word.strip() for word in given.split(","))
        names = tuple(dict.fromkeys(word for word in words if word))
        unknown_names = [name for name in names if name not in cluster_nodes]
        if unknown_names or not names:
            got, wanted = " ".join(unknown_names[:_MOST_UNKNOWN]), ", ".join(cluster_nodes)
            raise UsageError("no such node", where="--nodes", got=got, wanted=wanted)
        return names

    def submit(self, task: NodeTask) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self._cluster_nodes()[task.node]
        if not node["Alive"]:
            self._end_reasons[task.node] = _death_reason(node)
            return
        cpus = node["Resources"].get("CPU", 0) if self._options.exclusive else 0
        remote = self._ray.remote(
            max_retries=0,
            max_calls=1,  # a process of its own
            num_cpus=cpus,
            num_gpus=self._options.gpus or 0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False),
        )(_program())
        log = None if task.log is None else str(task.log)
        # with accelerators requested, Ray's choice of them stands; without, Ray may have hidden all
        visibility = [] if self._options.gpus else _VISIBILITY
        self._tasks[task.node] = remote.remote(list(task.command), os.getcwd(), log, python_path(), visibility)

    def poll(self) -> Mapping[str, TaskState]:
        try:
            cluster_nodes = self._cluster_nodes()
            ended_tasks, _ = self._ray.wait(list(self._tasks.values()), num_returns=len(self._tasks), timeout=0)
        except Exception as error:  # Ray raises kinds of several modules
            raise SchedulerError(f"Ray: {first_line(error)}") from None
        for node, task in self._tasks.items():
            if node in self._end_reasons:
                continue
            if task in ended_tasks:
                self._end_reasons[node] = self._end_reason(task)
            elif not cluster_nodes[node]["Alive"]:
                self._end_reasons[node] = _death_reason(cluster_nodes[node])
        # a task that has not ended counts as waiting: Ray does not say whether it runs, its node does
        states = dict.fromkeys(self._tasks, TaskState(standing=Standing.WAITING))
        for node, reason in self._end_reasons.items():
            states[node] = TaskState(standing=Standing.ENDED, reason=reason)
        return states

    def about(self, node: str) -> str:
        try:
            facts = self._cluster_nodes().get(node)
        except Exception as error:  # as above
            return f"Ray: {first_line(error)}"
        if facts is None:
            return ""
        return "Ray: node is alive" if facts["Alive"] else "Ray: node is dead"

    def cancel(self, nodes: Iterable[str]) -> None:
        tasks = [self._tasks[node] for node in nodes if node in self._tasks and node not in self._end_reasons]
        for task in tasks:
            self._ray.cancel(task, force=False)  # it ends its process, then itself
        if tasks:
            _, running_tasks = self._ray.wait(tasks, num_returns=len(tasks), timeout=_CANCEL_S)
            for task in running_tasks:
                self._ray.cancel(task, force=True)  # its process gets SIGTERM when its parent dies

    def _end_reason(self, task: Any) -> str:
        """Return how a task has ended."""
        try:
            return f"its task ended: exit status {self._ray.get(task)}"
        except Exception as error:  # as above
            return f"its task ended: {first_line(error)}"

    def _cluster_nodes(self) -> dict[str, dict[str, Any]]:
        """Return Ray's facts of the nodes by name.

        The name is the one that a node was started with, else its host's, else its address, where several nodes have
        that host.
        """
        facts_by_name: dict[str, dict[str, Any]] = {}
        # of several nodes with one name, the one that is alive comes last and stays
        nodes = sorted(self._ray.nodes(), key=lambda node: node["Alive"])
        hosts = [node["NodeManagerHostname"] for node in nodes if node["Alive"]]
        for node in nodes:
            name, host, address = node["NodeName"], node["NodeManagerHostname"], node["NodeManagerAddress"]
            if name in ("", address):  # Ray's name for a node that was started without one
                name = host if hosts.count(host) < 2 else address
            facts_by_name[name] = node
        return facts_by_name


def _death_reason(node: Mapping[str, Any]) -> str:
    """Return that a node is dead, and why: a drained one ends as soon as it runs nothing."""
    reason = " ".join(str(node.get("DeathReasonMessage") or "").split())[:_MOST_REASON]
    return f"its node is dead ({reason})" if reason else "its node is dead"


def _program() -> Any:
    """Return the function that a task runs: a function within a function travels as code, so nodes need no tool."""

    def run(command: list[str], folder: str, log: str | None, path: dict[str, str], visibility: list[str]) -> int:
        import ctypes
        import os
        import pathlib
        import signal
        import subprocess
        import time

        environment = {**os.environ, **path}
        for name in visibility:
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
