"""Run one process per device and load path on this host, and write a capture per case.

Neither the forkserver of multiprocessing nor a process pool: a fork silently keeps the kernels and threads that its
parent has chosen, and one killed worker breaks all jobs of a pool. Kernel variants of the CPU are forked from a process
that has imported the libraries and chosen nothing (`consistency.launch.forked`); each makes sure of that, and is
started as all others are where it is not so. A worker takes the cases in turn, because it takes longer to import the
libraries than to check a small case; where a case ends the process, a new one takes the rest.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from consistency.capture.claim import scratch_folder
from consistency.capture.node_group import NodeGroup, name_on
from consistency.capture.writer import CaptureWriter
from consistency.case.stages import SPECS, stages_of
from consistency.devices.host import read_host
from consistency.launch.assignment import Assignment, Ended
from consistency.launch.environment import shared_out, worker_threads
from consistency.launch.forked import Importers
from consistency.launch.open_case import OpenCase
from consistency.launch.plan import in_lanes, merged_waves, side_by_side
from consistency.launch.process import WorkerProcess, environment_of
from consistency.launch.scheduler import Captured, Limits, Task, Watcher
from consistency.worker.protocol import Event, RankGroup, lost_rank

POLL_S = 0.05
"""Seconds between two looks at the workers."""

_WAITED_FOR = stages_of(lambda spec: spec.feeds_inputs)
"""Stages whose float64 values one worker computes for all."""


class LocalScheduler:
    """Run every worker on this host.

    Parameters
    ----------
    importers : Importers, optional
        Those of a caller that captures several times with the same environments: it closes them. Otherwise each capture
        has its own.
    """

    def __init__(self, importers: Importers | None = None) -> None:
        self._importers = importers

    def capture(self, task: Task, *, watch: Watcher, replace: bool = False) -> Generator[Captured]:
        """Run the cases on this host: see `consistency.launch.scheduler.Scheduler`."""
        with ExitStack() as stack:
            scratch = stack.enter_context(scratch_folder("workers"))
            cases = []
            for number, case_task in enumerate(task.cases):
                writer = stack.enter_context(CaptureWriter(case_task.target, replace=replace))
                case_scratch = scratch / str(number)
                case_scratch.mkdir()
                cases.append(OpenCase(number=number, task=case_task, writer=writer, scratch=case_scratch))
            importers = self._importers
            if importers is None:
                models = any(case_task.case.needs_model for case_task in task.cases)
                importers = stack.enter_context(closing(Importers(models=models, folder=task.cases[0].target)))
            yield from _Run(cases, task.limits, watch, importers).captures()


def _form_groups(
    assigned: Sequence[Assignment], *, stall_s: float, together: NodeGroup | None = None
) -> dict[str, tuple[str, ...]]:
    """Form groups of the workers of a case that run side by side, and give each assignment its group.

    The workers of the accelerators of one type form a group; those of the CPU where the case has no accelerator.

    Returns
    -------
    dict of str to tuple of str
        The workers of this host by the name of their group; one alone is in a group with those of other nodes.
    """
    groups: dict[str, tuple[str, ...]] = {}
    for members in _possible_groups(assigned):
        computes_together = any(SPECS[stage].together for stage in members[0].case.stages)
        is_alone = len(members) < 2 and together is None
        if not computes_together or is_alone:
            continue
        ranks = tuple(member.plan.name for member in members)
        for rank, member in enumerate(members):
            plan = member.plan
            name = f"group-{plan.info.spec.type}-{plan.load_path}-{plan.turn}"
            folder = member.open_case.scratch / name
            group = RankGroup(rank=rank, ranks=ranks, folder=str(folder), timeout_s=stall_s / 2)
            if together is not None:
                group = msgspec.structs.replace(
                    group, node=together.node, nodes=together.nodes, folder=str(Path(together.folder) / name)
                )
            member.group, groups[name] = group, ranks
    return groups


def _possible_groups(assigned: Sequence[Assignment]) -> Iterator[list[Assignment]]:
    """Yield the workers of every case by the type of their device; the CPU's only where there is no accelerator."""
    for number in {assignment.open_case.number for assignment in assigned}:
        of_case = [assignment for assignment in assigned if assignment.open_case.number == number]
        accelerators = {
            assignment.plan.info.spec.type for assignment in of_case if not assignment.plan.info.spec.is_cpu
        }
        for device_type in accelerators or {"cpu"}:
            members = [assignment for assignment in of_case if assignment.plan.info.spec.type == device_type]
            if members:
                yield members


def _tell_group(assignment: Assignment, ended: Ended) -> None:
    """Tell the other workers of a group why a worker is lost: they wait for it."""
    group = assignment.group
    if group is None or ended.status == "ok":
        return
    name = assignment.plan.name
    if group.node:
        name = name_on(group.node, name)
    lost_rank(Path(group.folder), name).write_text(ended.reason or "", encoding="utf-8")


def _queue_slug(queue: Sequence[Assignment]) -> str:
    """Return the name of the worker that takes a queue of assignments, which all have its device and load path."""
    return queue[0].plan.slug


class _Run:
    """The workers of a task, wave by wave."""

    def __init__(self, cases: Sequence[OpenCase], limits: Limits, watch: Watcher, importers: Importers) -> None:
        self._cases = cases
        self._limits = limits
        self._watch = watch
        plans = itertools.chain.from_iterable(case.plans for case in cases)
        self._devices = list({plan.name: plan.info for plan in plans}.values())
        self._host = read_host(self._devices)
        self._importers = importers

    def captures(self) -> Iterator[Captured]:
        """Run every wave; yield each case as its last worker ends."""
        waves = self._assign()
        self._group(waves)  # before any worker starts: its job names its group
        waves_in_lanes = [self._split_into_lanes(queues) for queues in waves]
        # all workers are counted before the first starts: importers are only worth it for two of one environment
        for queues, threads in waves_in_lanes:
            for queue in queues:
                if queue[0].plan.info.spec.is_cpu:
                    self._importers.expect(environment_of(queue[0], threads=threads[_queue_slug(queue)]))
        for queues, threads in waves_in_lanes:
            yield from self._run_wave(queues, threads)

    def _assign(self) -> list[list[list[Assignment]]]:
        """Return the waves, each as the queues of its processes."""
        tasks = [case.task for case in self._cases]
        waves = merged_waves([task.waves for task in tasks], [task.case.process_key for task in tasks])
        assigned: list[list[list[Assignment]]] = []
        for wave in side_by_side(waves, self._limits.at_once):
            queues = []
            for turns in wave:
                queues.append([Assignment(open_case=self._cases[number], plan=plan) for number, plan in turns])
            assigned.append(queues)
        return assigned

    def _group(self, waves: Sequence[Sequence[Sequence[Assignment]]]) -> None:
        """Form the groups of workers that compute together, and tell the other nodes which workers this host has."""
        together = self._limits.together
        groups: dict[str, tuple[str, ...]] = {}
        for queues in waves:
            beside = list(itertools.chain.from_iterable(queues))
            groups |= _form_groups(beside, stall_s=self._limits.stall_s, together=together)
        if together is not None:
            together.tell(groups)

    def _split_into_lanes(
        self, queues: Sequence[Sequence[Assignment]]
    ) -> tuple[list[list[Assignment]], dict[str, int | None]]:
        """Split the processes of a wave so that cases run side by side; return them, and the threads by worker."""
        cases = {assignment.open_case.number for assignment in itertools.chain.from_iterable(queues)}
        lanes = min(self._limits.cases_at_once, len(cases))
        if self._limits.together is not None:
            lanes = 1  # a case that waits for other nodes must not begin long before theirs
        # cases side by side share the threads; None, the user's variables, stays
        threads = {slug: count and max(1, count // lanes) for slug, count in self._threads(queues).items()}
        return in_lanes(queues, lanes, of=lambda assignment: assignment.open_case.number), threads

    def _threads(self, queues: Sequence[Sequence[Assignment]]) -> dict[str, int | None]:
        """Return the threads by worker of a wave; None leaves the user's variables."""
        assignments = itertools.chain.from_iterable(queues)
        waits = any(set(_WAITED_FOR) & set(assignment.case.stages) for assignment in assignments)
        shared = shared_out([queue[0].plan for queue in queues], waits=waits)
        return {
            _queue_slug(queue): worker_threads(self._limits.threads, share, pinned=queue[0].case.is_pinned)
            for queue, share in zip(queues, shared, strict=True)
        }

    def _run_wave(
        self, queues: Sequence[Sequence[Assignment]], threads: Mapping[str, int | None]
    ) -> Iterator[Captured]:
        """Run the processes of a wave side by side; yield each case whose last worker has ended."""
        running: list[WorkerProcess] = []
        try:
            for queue in queues:
                running.append(self._start(queue, threads[_queue_slug(queue)]))
            while running:
                for worker in list(running):
                    yield from self._follow(worker)
                    if worker.over:
                        worker.close()
                        running.remove(worker)
                        # it ended before its last case: a new process takes the others
                        if worker.assignments:
                            remaining = worker.assignments
                            running.append(self._start(remaining, threads[_queue_slug(remaining)]))
                time.sleep(POLL_S)
        finally:
            for worker in running:
                worker.close()

    def _follow(self, worker: WorkerProcess) -> Iterator[Captured]:
        """Pass on new events of a process; yield each case that it has ended as the last of the case's workers."""
        for assignment, ended in worker.ended(self._limits, self._watch):
            captured = self._end(assignment, ended)
            if not worker.over:
                self._announce(worker)
            if captured is not None:
                yield captured

    def _start(self, queue: Sequence[Assignment], threads: int | None) -> WorkerProcess:
        worker = WorkerProcess.start(queue, threads=threads, importers=self._importers)
        self._announce(worker)
        return worker

    def _announce(self, worker: WorkerProcess) -> None:
        """Report which case a worker turns to."""
        if not worker.assignments:
            return
        assignment = worker.assignments[0]
        case = assignment.open_case
        # the first worker that turns to the case: its capture begins, with room kept for its tables
        if case.before is None:
            case.before = self._host
            case.writer.reserve()
        if len(self._cases) > 1:
            name, total = assignment.case.name, len(self._cases)
            turn = Event(at=time.time(), kind="case", message=name, done=case.number, total=total)
            self._watch(assignment.plan.label, turn)

    def _end(self, assignment: Assignment, ended: Ended) -> Captured | None:
        """Note how a worker's case ended; return the case if that was the last of its workers."""
        case = assignment.open_case
        assignment.end(ended)
        _tell_group(assignment, ended)
        if ended.status != "ok":
            failed = Event(at=time.time(), kind="failed", message=ended.reason or "")
            self._watch(assignment.plan.label, failed)
        # a single case whose files cannot be used ends at once; among several, all of its workers have their turn
        ends_at_once = case.error is not None and len(self._cases) == 1
        if case.workers_left and not ends_at_once:
            return None
        self._host = read_host(self._devices)
        return case.close(self._host)
