"""Workers that take turns in the process of the tests: importing the libraries takes a worker most of its time.

For tests of what is found in captures, and of what is said of it. A process chooses its kernels once, so kernel
variants are names here. That processes are started, followed and lost is seen in test_local.py, test_end_to_end.py and
the tests of planted faults that end one.
"""

from __future__ import annotations

import gc
import subprocess
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from consistency.launch.assignment import Assignment
from consistency.launch.forked import Importers
from consistency.launch.process import WorkerProcess
from consistency.worker import __main__ as worker
from consistency.worker.protocol import EventLog, Job

ENDS_PROCESS = ("killed", "hung", "stopped")


class _Turn:
    """What is asked of a worker's process. It does its jobs when it is asked first whether it has ended.

    By then the scheduler has seen the workers before it to their end: one that waits for their reference finds it.
    """

    stdin = None

    def __init__(self, jobs: list[Job]) -> None:
        assert not any(job.fault in ENDS_PROCESS for job in jobs), "it would end the tests"
        self._jobs = jobs
        self._status: int | None = None

    def poll(self) -> int:
        if self._status is None:
            self._status = _do(self._jobs)
        return self._status


def _do(jobs: list[Job]) -> int:
    """Do the jobs as a worker's process does; return its exit status."""
    gc.collect()  # a worker freezes what is there when it imports the libraries: models of earlier tests would stay
    status, bases = 0, worker._Bases(jobs)
    for job in jobs:
        events = EventLog(Path(job.folder) / "events.jsonl", is_on_cpu=job.device == "cpu")
        with events, warnings.catch_warnings(action="ignore"):  # a worker's are in its log
            status, goes_on = worker._do(job, events, bases)
        if not goes_on:
            break
    return status


@contextmanager
def in_this_process() -> Iterator[None]:
    """Run workers in this process, one after the other, instead of processes of their own."""

    def start(assignments: Iterable[Assignment], *, threads: int | None, importers: Importers) -> WorkerProcess:
        queue = deque(assignments)
        queue[0].begin()
        assert all(one.plan.change is None for one in queue), "a change of the environment needs a process"
        turn = _Turn([one.job(threads=threads) for one in queue])
        return WorkerProcess(assignments=queue, process=cast("subprocess.Popen[bytes]", turn))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerProcess, "start", start)
        yield
