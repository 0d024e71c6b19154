"""Slurm: one job per node, or, inside an allocation, one job step per node.

One job for all nodes would end with the first node that fails, could not start before the last one is free, and could
not be cancelled for one node alone.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence

from consistency.devices.interpreter import python_path
from consistency.errors import UsageError
from consistency.extras.operations.fleet.schedulers.options import FleetOptions
from consistency.extras.operations.fleet.schedulers.scheduler import NodeTask, SchedulerError, Standing, TaskState

_ANSWER_S = 60.0  # a busy controller answers within Slurm's MessageTimeout, 10 s; its clients try a few times
_KILL_S = 10.0  # srun passes a signal on and waits for its task, which may be frozen
_AT_ONCE = 500  # names or numbers in one command line
_MOST_UNKNOWN = 6  # unknown names in an error

_UNUSABLE = ("down", "drain", "fail", "error", "inval", "unknown")
"""Beginnings of the states of a node that takes no job; one that is `idle~` is only switched off."""

# states of jobs: those in neither of these have ended
_WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")


class SlurmScheduler:
    """Run tasks as jobs of Slurm, or as steps of the job that this process is in."""

    def __init__(self, options: FleetOptions) -> None:
        self._options = options
        self._name = f"consistency-{uuid.uuid4().hex[:8]}"  # name of all jobs, by which they are found
        self._allocation = os.environ.get("SLURM_JOB_ID")  # None outside an allocation
        self._jobs: dict[str, str] = {}  # job numbers by node
        self._steps: dict[str, subprocess.Popen[str]] = {}  # processes of srun by node
        self._step_errors: dict[str, str] = {}  # errors that srun printed about steps that have ended, by node
        self._unusable: dict[str, str] = {}  # states of unusable nodes at the last poll

    def nodes(self, given: str | None) -> tuple[str, ...]:
        if given is None:
            given = os.environ.get("SLURM_JOB_NODELIST")
            if given is None:
                raise UsageError(
                    "--nodes is required outside a Slurm allocation",
                    wanted="a list as Slurm writes it, or all",
                    hint="inside an allocation, its nodes are the default",
                )
        cluster_nodes = self._cluster_nodes()
        if not cluster_nodes:
            partition = self._options.partition
            raise UsageError("no such partition, or one without nodes", where="--partition", got=partition)
        if given == "all":
            return cluster_nodes
        names = tuple(dict.fromkeys(_asked("scontrol", "show", "hostnames", given, where="--nodes").split()))
        unknown_names = [name for name in names if name not in cluster_nodes]
        if unknown_names or not names:
            raise UsageError(
                "no such node" if unknown_names else "no node",
                where="--nodes",
                got=" ".join(unknown_names[:_MOST_UNKNOWN]) or given,
                wanted=_asked("scontrol", "show", "hostlist", ",".join(cluster_nodes)).strip(),
            )
        return names

    def submit(self, task: NodeTask) -> None:
        if self._allocation is not None:
            self._start_step(task)
            return
        script = f"#!/bin/sh\nexec {shlex.join(task.command)}\n"
        words = ["sbatch", "--parsable", f"--job-name={self._name}", "--no-requeue", *self._common_arguments(task)]
        answer = _asked(*words, stdin=script, where=f"sbatch for node {task.node}")
        self._jobs[task.node] = answer.strip().partition(";")[0]

    def poll(self) -> Mapping[str, TaskState]:
        if self._allocation is not None:
            return {node: self._step_state(node, step) for node, step in self._steps.items()}
        rows = self._queue_rows()
        waiting = []
        for node, job in self._jobs.items():
            if job in rows and rows[job][0] in _WAITS:
                waiting.append(node)
        # a node that restarts is down for a moment, so it has to be unusable at two polls
        unusable_before, self._unusable = self._unusable, _unusable_nodes(waiting)
        states = {}
        for node, job in self._jobs.items():
            if job not in rows:
                states[node] = TaskState(standing=Standing.ENDED, reason="its job has left the queue")
                continue
            state, reason = rows[job]
            if state in _RUNS:
                states[node] = TaskState(standing=Standing.RUNNING)
            elif state not in _WAITS:
                states[node] = TaskState(standing=Standing.ENDED, reason=f"its job ended: {state}, {reason}")
            elif node in self._unusable and node in unusable_before:
                states[node] = TaskState(standing=Standing.DOWN, reason=self._unusable[node])
            else:
                states[node] = TaskState(standing=Standing.WAITING, reason="" if reason == "None" else reason)
        return states

    def about(self, node: str) -> str:
        try:
            state = _node_states([node]).get(node, "")
        except SchedulerError as error:
            return str(error)
        return f"Slurm: {state}" if state else ""

    def cancel(self, nodes: Iterable[str]) -> None:
        nodes = list(nodes)
        steps = [self._steps[node] for node in nodes if node in self._steps]
        # all are told first, and waited for after that, so that they end side by side
        for step in steps:
            if step.poll() is None:
                step.terminate()  # srun cancels its step
        for step in steps:
            try:
                step.wait(_KILL_S)
            except subprocess.TimeoutExpired:
                step.kill()
        jobs = [self._jobs[node] for node in nodes if node in self._jobs]
        for start in range(0, len(jobs), _AT_ONCE):
            _run("scancel", "--quiet", *jobs[start : start + _AT_ONCE])

    def _cluster_nodes(self) -> tuple[str, ...]:
        """Return the nodes of the partition, or of all."""
        partition = [] if self._options.partition is None else [f"--partition={self._options.partition}"]
        answer = _asked("sinfo", "-h", "-N", "-o", "%N", *partition, where="--engine slurm")
        return tuple(dict.fromkeys(answer.split()))

    def _queue_rows(self) -> dict[str, tuple[str, str]]:
        """Return state and reason of the jobs in the queue, by number."""
        # asked by name, because a number that the controller has forgotten would be an error
        answer = _answer("squeue", "-h", "-t", "all", f"--name={self._name}", "-o", "%i|%T|%r")
        rows = {}
        for line in answer.splitlines():
            cells = line.split("|", 2)
            if len(cells) == 3:
                job, state, reason = cells
                rows[job] = (state, reason)
        return rows

    def _start_step(self, task: NodeTask) -> None:
        """Start a job step; srun stays until it has ended."""
        words = [
            "srun",
            f"--jobid={self._allocation}",
            f"--job-name={self._name}",
            "--overlap",
            "--cpu-bind=none",
            "--no-kill",
            "--kill-on-bad-exit=0",
            "--input=none",
            *self._common_arguments(task),
            *task.command,
        ]
        self._steps[task.node] = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
            start_new_session=True,  # Ctrl-C goes to the fleet alone, which then cancels
        )

    def _common_arguments(self, task: NodeTask) -> list[str]:
        """Return the arguments that a job and a step have in common."""
        options = self._options
        words = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={task.node}"]
        words += [f"--output={task.log or os.devnull}", "--open-mode=truncate"]
        if options.partition is not None:
            words.append(f"--partition={options.partition}")
        if options.account is not None:
            words.append(f"--account={options.account}")
        if options.gpus is not None:
            words.append(f"--gpus-per-node={options.gpus}")
        if options.exclusive and self._allocation is None:
            words += ["--exclusive", "--mem=0"]
        for arguments in options.engine_args:
            words += shlex.split(arguments)
        return words

    def _step_state(self, node: str, step: subprocess.Popen[str]) -> TaskState:
        """Return the state of a job step."""
        status = step.poll()
        if status is None:
            return TaskState(standing=Standing.RUNNING)
        if node not in self._step_errors:
            assert step.stderr is not None
            with step.stderr:
                lines = step.stderr.read().splitlines()
            # srun has remarks too
            self._step_errors[node] = "; ".join(line for line in lines if line.startswith("srun: error"))
        reason = self._step_errors[node] or f"exit status {status}"
        return TaskState(standing=Standing.ENDED, reason=f"its job step ended: {reason}")


def _unusable_nodes(nodes: Sequence[str]) -> dict[str, str]:
    """Return the states of those of the nodes that take no job."""
    return {node: state for node, state in _node_states(nodes).items() if state.startswith(_UNUSABLE)}


def _node_states(nodes: Sequence[str]) -> dict[str, str]:
    """Return the state of nodes, with its reason: `drained (bad fan)`."""
    states = {}
    for start in range(0, len(nodes), _AT_ONCE):
        answer = _answer("sinfo", "-h", "-N", "-n", ",".join(nodes[start : start + _AT_ONCE]), "-o", "%N|%T|%E")
        for line in answer.splitlines():
            node, state, reason = line.split("|", 2)
            states[node] = state if reason in ("none", "") else f"{state} ({reason})"
    return states


def _answer(*words: str) -> str:
    """Return the output of a command of Slurm; raise `SchedulerError` where the controller does not answer."""
    process = _run(*words)
    if process.returncode:
        raise SchedulerError(f"{words[0]}: {process.stderr.strip()}")
    return process.stdout


def _asked(*words: str, stdin: str | None = None, where: str | None = None) -> str:
    """Return the output of a command of Slurm; raise `UsageError` where it refuses what the user has asked for."""
    process = _run(*words, stdin=stdin)
    if process.returncode:
        raise UsageError("Slurm refuses", where=where, got=process.stderr.strip() or f"status {process.returncode}")
    return process.stdout


def _run(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm; raise UsageError if it is not installed, SchedulerError if it takes too long."""
    try:
        return subprocess.run(
            words,
            input=stdin or "",
            capture_output=True,
            text=True,
            check=False,
            timeout=_ANSWER_S,
            env=_environment(),
        )
    except FileNotFoundError:
        hint = "run it where jobs are submitted"
        raise UsageError("Slurm is not on this host", where="--engine slurm", got=f"no {words[0]}", hint=hint) from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{words[0]} did not answer within {_ANSWER_S:g} s") from None


def _environment() -> dict[str, str]:
    return {**os.environ, **python_path()}
