"""One worker's process, seen from outside: started with its cases, followed, and ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from consistency.capture.writer import cannot_write, write_json
from consistency.devices.interpreter import python_command
from consistency.launch.assignment import JOBS, Assignment, Ended
from consistency.launch.change import Change
from consistency.launch.environment import worker_environment
from consistency.launch.forked import ForkedProcess, Importers
from consistency.launch.scheduler import Limits, Watcher
from consistency.worker.protocol import EventLog

DUMP_GRACE_S = 5.0  # faulthandler writes its stacks in milliseconds, unless the process is swapping


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """A worker's process, with the cases that it takes."""

    assignments: deque[Assignment]
    """Cases that have not ended, in the order in which it takes them."""
    process: subprocess.Popen[bytes] | ForkedProcess
    over: bool = False
    """Whether the process has ended."""
    _ended_any: bool = False
    """Whether any of its cases has ended."""

    @classmethod
    def start(cls, assignments: Iterable[Assignment], *, threads: int | None, importers: Importers) -> WorkerProcess:
        """Start a process for assignments that have the same device and load path; it takes them in their order."""
        queue = deque(assignments)
        first = queue[0]
        folder = first.folder
        environment = environment_of(first, threads=threads)
        importer = importers.one_for(first.plan.info.spec, environment)
        jobs = folder / JOBS
        parent = None if importer is None else importer.pid
        write_json(jobs, [assignment.job(threads=threads, parent_pid=parent) for assignment in queue])
        process: subprocess.Popen[bytes] | ForkedProcess
        try:
            log = (folder / "log.txt").open("wb")
            if importer is not None:
                with EventLog(folder / "events.jsonl") as events:
                    events.stage("import")  # it is done for the worker
        except OSError as error:
            raise cannot_write(folder, error) from None
        with log:
            # a worker that is forked has imported the libraries already
            if importer is not None:
                process = importer.fork(jobs, log, environment)
            else:
                process = subprocess.Popen(
                    [*python_command(), "consistency.worker", str(jobs)],
                    stdin=subprocess.PIPE,  # held open: the worker ends when its parent is gone and this closes
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C goes to the parent alone, and the whole group can be killed
                )
        first.begin()
        return cls(assignments=queue, process=process)

    def ended(self, limits: Limits, watch: Watcher) -> Iterator[tuple[Assignment, Ended]]:
        """Pass on new events, and yield each case that has ended; kill a process that takes too long.

        Where the process ends before its last case, `over` is set and `assignments` has the remaining cases: a new
        process takes them.
        """
        while self.assignments and not self.over:
            assignment = self.assignments[0]
            status = self.process.poll()  # before the events are read: none can follow
            for event in assignment.events():
                watch(assignment.plan.label, event)
            ended = None
            if len(self.assignments) > 1:  # the last case has ended when the process has
                ended = assignment.ended_without_exit()
            if self._will_not_start(assignment, limits):
                self.over = True
                return  # the new process says what is wrong with the first case
            if ended is None:
                ended = self._ended_with_process(assignment, status, limits)
            if ended is None:
                return  # it goes on, or the process has ended between two cases
            self.assignments.popleft()
            self._ended_any = True
            if self.assignments:
                self.assignments[0].begin()
            yield assignment, ended

    def _ended_with_process(self, assignment: Assignment, status: int | None, limits: Limits) -> Ended | None:
        """Return how a case ended together with the process; kill one that exceeds a limit.

        None where the process goes on, and where it ended before it began the case, though not its first one.
        """
        if status is not None:
            self.over = True
            if self._ended_any and not assignment.began:
                return None
            return assignment.after_exit(status)
        limit = assignment.over_limit(limits)
        if limit is None:
            return None
        self._end_with_stack(assignment)
        self.over = True
        return assignment.lost(f"{limit} and was killed")

    def close(self) -> None:
        """Kill the worker and every process that it has started, unless it has ended."""
        if self.process.poll() is None:
            self._kill_group()
        if isinstance(self.process, ForkedProcess):
            self.process.close()
        elif self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def _will_not_start(self, assignment: Assignment, limits: Limits) -> bool:
        """Return whether the process was to be forked, and never will be or has taken too long to start."""
        if not isinstance(self.process, ForkedProcess) or self.process.pid is not None:
            return False
        if self.process.returncode is None and assignment.over_limit(limits) is None:
            return False
        self.process.give_up()
        return True

    def _kill_group(self) -> None:
        if self.process.pid is None:
            return  # there is none yet, and none will find its input open
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _end_with_stack(self, assignment: Assignment) -> None:
        """End the worker and every process that it has started; first it writes where it is, unless it has done so.

        Its handler ends it when the stack is written, so that one that was stopped does not go on from there.
        """
        if hasattr(signal, "SIGUSR1") and self.process.pid is not None and not assignment.stack():
            _to_main_thread(self.process.pid, signal.SIGUSR1)
            with suppress(ProcessLookupError, PermissionError):
                self.process.send_signal(signal.SIGCONT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(DUMP_GRACE_S)
        self._kill_group()  # no other group has its number so soon
        self.close()


def environment_of(assignment: Assignment, *, threads: int | None) -> dict[str, str]:
    """Return the environment of the process that takes an assignment first."""
    plan = assignment.plan
    change = plan.change or Change()
    return worker_environment(
        plan.info, plan.load_path, threads=threads, pinned=assignment.case.is_pinned, change=change.environment
    )


def _to_main_thread(pid: int, number: signal.Signals) -> None:
    """Send a signal for the main thread to take: any thread may take one of a process, while the main one goes on.

    Source: tgkill(2), signal(7) on signals that are sent to a stopped process.
    """
    with suppress(AttributeError):  # glibc has it since 2.30, and no other library of C
        ctypes.CDLL(None).tgkill(pid, pid, number)
        return
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
