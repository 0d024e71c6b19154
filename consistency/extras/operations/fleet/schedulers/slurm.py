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
from consistency.extras.operations.fleet.schedulers.engine import EngineError, NodeTask, Standing, TaskState
from consistency.extras.operations.fleet.schedulers.options import FleetOptions

_ANSWER_S = 60.0  # a busy controller answers within Slurm's MessageTimeout, 10 s; its clients try a few times
_KILL_S = 10.0  # srun passes a signal on and waits for its task, which may be frozen
_AT_ONCE = 500  # names or numbers in one command line

_UNUSABLE = ("down", "drain", "fail", "error", "inval", "unknown")
"""How the states of a node begin that takes no job; one that is `idle~` is only switched off."""

_WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")


class SlurmEngine:
    """Run tasks as jobs of Slurm, or as steps of the job that this process is in."""

    def __init__(self, options: FleetOptions) -> None:
        self._options = options
        self._name = f"consistency-{uuid.uuid4().hex[:8]}"
        self._allocation = os.environ.get("SLURM_JOB_ID")
        self._jobs: dict[str, str] = {}
        self._steps: dict[str, subprocess.Popen[str]] = {}
        self._said: dict[str, str] = {}  # by srun of a step that has ended
        self._unusable: dict[str, str] = {}

    def nodes(self, given: str | None) -> tuple[str, ...]:
        if given is None:
            given = os.environ.get("SLURM_JOB_NODELIST")
            if given is None:
                raise UsageError(
                    "--nodes is required outside a Slurm allocation",
                    wanted="a list as Slurm writes it, or all",
                    hint="inside an allocation, its nodes are the default",
                )
        partition = self._options.partition
        known = self._known()
        if not known:
            raise UsageError("no such partition, or one without nodes", where="--partition", got=partition)
        if given == "all":
            return known
        names = tuple(dict.fromkeys(_asked("scontrol", "show", "hostnames", given, where="--nodes").split()))
        strangers = [name for name in names if name not in known]
        if strangers or not names:
            raise UsageError(
                "no such node" if strangers else "no node",
                where="--nodes",
                got=" ".join(strangers[:6]) or given,
                wanted=_asked("scontrol", "show", "hostlist", ",".join(known)).strip(),
            )
        return names

    def submit(self, task: NodeTask) -> None:
        if self._allocation is not None:
            self._start_step(task)
            return
        script = f"#!/bin/sh\nexec {shlex.join(task.command)}\n"
        words = ["sbatch", "--parsable", f"--job-name={self._name}", "--no-requeue", *self._placed(task)]
        answer = _asked(*words, given=script, where=f"sbatch for node {task.node}")
        self._jobs[task.node] = answer.strip().partition(";")[0]

    def poll(self) -> Mapping[str, TaskState]:
        if self._allocation is not None:
            return {node: self._of_step(node, step) for node, step in self._steps.items()}
        # by name, because a number that the controller has forgotten would be an error
        listed = _answer("squeue", "-h", "-t", "all", f"--name={self._name}", "-o", "%i|%T|%r")
        rows = {parts[0]: parts for line in listed.splitlines() if len(parts := line.split("|", 2)) == 3}
        waiting = [node for node, job in self._jobs.items() if rows.get(job, ("", ""))[1] in _WAITS]
        before, self._unusable = self._unusable, self._unusable_of(waiting)
        found = {}
        for node, job in self._jobs.items():
            if job not in rows:
                found[node] = TaskState(standing=Standing.ENDED, reason="its job has left the queue")
                continue
            _, state, reason = rows[job]
            if state in _RUNS:
                found[node] = TaskState(standing=Standing.RUNNING)
            elif state not in _WAITS:
                found[node] = TaskState(standing=Standing.ENDED, reason=f"its job ended: {state}, {reason}")
            elif node in self._unusable and node in before:  # twice: a node that restarts is down for a moment
                found[node] = TaskState(standing=Standing.DOWN, reason=self._unusable[node])
            else:
                found[node] = TaskState(standing=Standing.WAITING, reason="" if reason == "None" else reason)
        return found

    def about(self, node: str) -> str:
        try:
            found = _states([node]).get(node, "")
        except EngineError as error:
            return str(error)
        return f"Slurm: {found}" if found else ""

    def cancel(self, nodes: Iterable[str]) -> None:
        nodes = list(nodes)
        for step in (steps := [self._steps[node] for node in nodes if node in self._steps]):
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

    def _known(self) -> tuple[str, ...]:
        where = [] if self._options.partition is None else [f"--partition={self._options.partition}"]
        return tuple(dict.fromkeys(_asked("sinfo", "-h", "-N", "-o", "%N", *where, where="--engine slurm").split()))

    def _start_step(self, task: NodeTask) -> None:
        words = [
            "srun",
            f"--jobid={self._allocation}",
            f"--job-name={self._name}",
            "--overlap",
            "--cpu-bind=none",
            "--no-kill",
            "--kill-on-bad-exit=0",
            "--input=none",
            *self._placed(task),
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

    def _placed(self, task: NodeTask) -> list[str]:
        """Return the arguments that a job and a step have in common."""
        options = self._options
        words = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={task.node}"]
        words += [f"--output={task.log or os.devnull}", "--open-mode=truncate"]
        words += [] if options.partition is None else [f"--partition={options.partition}"]
        words += [] if options.account is None else [f"--account={options.account}"]
        words += [] if options.gpus is None else [f"--gpus-per-node={options.gpus}"]
        words += ["--exclusive", "--mem=0"] if options.exclusive and self._allocation is None else []
        return [*words, *(word for text in options.engine_args for word in shlex.split(text))]

    def _of_step(self, node: str, step: subprocess.Popen[str]) -> TaskState:
        status = step.poll()
        if status is None:
            return TaskState(standing=Standing.RUNNING)
        if node not in self._said:
            assert step.stderr is not None
            with step.stderr:
                lines = step.stderr.read().splitlines()
            # srun has remarks too
            self._said[node] = "; ".join(line for line in lines if line.startswith("srun: error"))
        said = self._said[node] or f"exit status {status}"
        return TaskState(standing=Standing.ENDED, reason=f"its job step ended: {said}")

    def _unusable_of(self, nodes: Sequence[str]) -> dict[str, str]:
        return {node: state for node, state in _states(nodes).items() if state.startswith(_UNUSABLE)}


def _states(nodes: Sequence[str]) -> dict[str, str]:
    """Return the state of nodes, with its reason: `drained (bad fan)`."""
    found = {}
    for start in range(0, len(nodes), _AT_ONCE):
        listed = _answer("sinfo", "-h", "-N", "-n", ",".join(nodes[start : start + _AT_ONCE]), "-o", "%N|%T|%E")
        for line in listed.splitlines():
            node, state, reason = line.split("|", 2)
            found[node] = state if reason in ("none", "") else f"{state} ({reason})"
    return found


def _answer(*words: str) -> str:
    """Return what a command of Slurm prints; raise `EngineError` where the controller does not answer."""
    done = _run(*words)
    if done.returncode:
        raise EngineError(f"{words[0]}: {done.stderr.strip()}")
    return done.stdout


def _asked(*words: str, given: str | None = None, where: str | None = None) -> str:
    """Return what a command of Slurm prints; raise `UsageError` where it refuses what the user has asked for."""
    done = _run(*words, given=given)
    if done.returncode:
        raise UsageError("Slurm refuses", where=where, got=done.stderr.strip() or f"status {done.returncode}")
    return done.stdout


def _run(*words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            input=given or "",
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
        raise EngineError(f"{words[0]} did not answer within {_ANSWER_S:g} s") from None


def _environment() -> dict[str, str]:
    return {**os.environ, **python_path()}
