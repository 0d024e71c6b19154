"""Run one process per device and load path on this host, and write a capture per case.

Neither the forkserver of multiprocessing nor a process pool: a fork silently keeps the kernels and threads that its
parent has chosen, and one killed worker breaks all jobs of a pool. Kernel variants of the CPU are forked from a process
that has imported the libraries and chosen nothing (`consistency.launch.forked`); each makes sure of that, and is
started as all others are where it is not so. A worker takes the cases in turn, because it takes longer to import the
libraries than to check a small case; where a case ends the process, a new one takes the rest.
"""

from __future__ import annotations

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
from consistency.launch.engine import Captured, Limits, Task, Watcher
from consistency.launch.environment import shared_out, worker_threads
from consistency.launch.forked import Importers
from consistency.launch.open_case import OpenCase
from consistency.launch.plan import in_lanes, merged_waves, side_by_side
from consistency.launch.process import WorkerProcess, environment_of
from consistency.worker.protocol import Event, RankGroup, lost_rank

POLL_S = 0.05
_WAITED_FOR = stages_of(lambda spec: spec.feeds_inputs)
"""Stages of which one worker computes the float64 values for all."""


class LocalEngine:
    """Run every worker on this host.

    Parameters
    ----------
    importers : Importers, optional
        Of a caller that captures several times with the same environments: it closes them. Otherwise each capture has
        its own.
    """

    def __init__(self, importers: Importers | None = None) -> None:
        self._importers = importers

    def capture(self, task: Task, *, watch: Watcher, replace: bool = False) -> Generator[Captured]:
        with ExitStack() as stack:
            scratch = stack.enter_context(scratch_folder("workers"))
            cases = []
            for number, one in enumerate(task.cases):
                writer = stack.enter_context(CaptureWriter(one.target, replace=replace))
                home = scratch / str(number)
                home.mkdir()
                cases.append(OpenCase(number=number, task=one, writer=writer, scratch=home))
            importers = self._importers
            if importers is None:
                models = any(one.case.needs_model for one in task.cases)
                importers = stack.enter_context(closing(Importers(models=models, folder=task.cases[0].target)))
            yield from _Run(cases, task.limits, watch, importers).captures()


def _form_groups(
    assigned: Sequence[Assignment], *, stall_s: float, together: NodeGroup | None = None
) -> dict[str, tuple[str, ...]]:
    """Join the workers of a case that run side by side: those of the accelerators of one type, or of the CPU alone.

    Returns
    -------
    dict of str to tuple of str
        The workers of this host by the name of their group; one alone is in a group with those of other nodes.
    """
    found: dict[str, tuple[str, ...]] = {}
    for number in {one.open_case.number for one in assigned}:
        of_case = [one for one in assigned if one.open_case.number == number]
        kinds = {one.plan.info.spec.type for one in of_case if not one.plan.info.spec.is_cpu} or {"cpu"}
        for kind in kinds:
            members = [one for one in of_case if one.plan.info.spec.type == kind]
            if not members or not any(SPECS[stage].together for stage in members[0].case.stages):
                continue
            if len(members) < 2 and together is None:
                continue
            ranks = tuple(one.plan.name for one in members)
            for rank, one in enumerate(members):
                name = f"group-{kind}-{one.plan.load_path}-{one.plan.turn}"
                folder = one.open_case.scratch / name
                group = RankGroup(rank=rank, ranks=ranks, folder=str(folder), timeout_s=stall_s / 2)
                if together is not None:
                    group = msgspec.structs.replace(
                        group, node=together.node, nodes=together.nodes, folder=str(Path(together.folder) / name)
                    )
                one.group, found[name] = group, ranks
    return found


def _tell_group(one: Assignment, ended: Ended) -> None:
    """Tell the workers of its group why a worker is lost: they wait for it."""
    if one.group is None or ended.status == "ok":
        return
    name = name_on(one.group.node, one.plan.name) if one.group.node else one.plan.name
    lost_rank(Path(one.group.folder), name).write_text(ended.reason or "", encoding="utf-8")


class _Run:
    """The workers of a task, wave by wave."""

    def __init__(self, cases: Sequence[OpenCase], limits: Limits, watch: Watcher, importers: Importers) -> None:
        self._cases = cases
        self._limits = limits
        self._watch = watch
        self._devices = list({plan.name: plan.info for one in cases for plan in one.plans}.values())
        self._host = read_host(self._devices)
        self._importers = importers

    def captures(self) -> Iterator[Captured]:
        """Run every wave; yield each case as its last worker ends."""
        tasks = [one.task for one in self._cases]
        waves = merged_waves([task.waves for task in tasks], [task.case.process_key for task in tasks])
        together = self._limits.together
        groups: dict[str, tuple[str, ...]] = {}
        planned = [
            [[Assignment(open_case=self._cases[number], plan=plan) for number, plan in turns] for turns in wave]
            for wave in side_by_side(waves, self._limits.at_once)
        ]
        for assigned in planned:
            beside = [one for queue in assigned for one in queue]
            groups |= _form_groups(beside, stall_s=self._limits.stall_s, together=together)
        if together is not None:
            together.tell(groups)
        laned = [self._in_lanes(queues) for queues in planned]
        for queues, threads in laned:
            for queue in queues:
                if queue[0].plan.info.spec.is_cpu:
                    self._importers.expect(environment_of(queue[0], threads=threads[queue[0].plan.slug]))
        for queues, threads in laned:
            yield from self._wave(queues, threads)

    def _in_lanes(self, queues: Sequence[Sequence[Assignment]]) -> tuple[list[list[Assignment]], dict[str, int | None]]:
        """Return the processes of a wave, for several of its cases side by side, and the threads of each worker."""
        lanes = min(self._limits.cases_at_once, len({one.open_case.number for queue in queues for one in queue}))
        if self._limits.together is not None:
            lanes = 1  # a case that waits for other nodes must not begin long before theirs
        threads = {slug: own and max(1, own // lanes) for slug, own in self._threads(queues).items()}
        return in_lanes(queues, lanes, of=lambda one: one.open_case.number), threads

    def _threads(self, queues: Sequence[Sequence[Assignment]]) -> dict[str, int | None]:
        """Return the threads of each worker of a wave."""
        waits = any(set(_WAITED_FOR) & set(one.case.stages) for queue in queues for one in queue)
        shared = shared_out([queue[0].plan for queue in queues], waits=waits)
        return {
            queue[0].plan.slug: worker_threads(self._limits.threads, share, pinned=queue[0].case.is_pinned)
            for queue, share in zip(queues, shared, strict=True)
        }

    def _wave(self, queues: Sequence[Sequence[Assignment]], threads: Mapping[str, int | None]) -> Iterator[Captured]:
        running: list[WorkerProcess] = []
        try:
            for queue in queues:
                running.append(self._start(queue, threads[queue[0].plan.slug]))
            while running:
                for worker in list(running):
                    for one, ended in worker.ended(self._limits, self._watch):
                        captured = self._end(one, ended)
                        if not worker.over:
                            self._announce(worker)
                        if captured is not None:
                            yield captured
                    if worker.over:
                        worker.close()
                        running.remove(worker)
                        if worker.assignments:
                            running.append(self._start(worker.assignments, threads[worker.assignments[0].plan.slug]))
                time.sleep(POLL_S)
        finally:
            for worker in running:
                worker.close()

    def _start(self, queue: Sequence[Assignment], threads: int | None) -> WorkerProcess:
        worker = WorkerProcess.start(queue, threads=threads, importers=self._importers)
        self._announce(worker)
        return worker

    def _announce(self, worker: WorkerProcess) -> None:
        """Report which case a worker turns to."""
        if not worker.assignments:
            return
        one = worker.assignments[0]
        case = one.open_case
        if case.before is None:
            case.before = self._host
            case.writer.reserve()
        if len(self._cases) > 1:
            turn = Event(at=time.time(), kind="case", message=one.case.name, done=case.number, total=len(self._cases))
            self._watch(one.plan.label, turn)

    def _end(self, one: Assignment, ended: Ended) -> Captured | None:
        """Note how a worker's case ended; return the case if that was the last of its workers."""
        case = one.open_case
        one.end(ended)
        _tell_group(one, ended)
        if ended.status != "ok":
            self._watch(one.plan.label, Event(at=time.time(), kind="failed", message=ended.reason or ""))
        if case.workers_left and (case.error is None or len(self._cases) > 1):
            return None
        self._host = read_host(self._devices)
        return case.close(self._host)
