"""Run one process per device and load path on this host, and write a capture per case.

Neither the forkserver of multiprocessing nor a process pool: a fork silently keeps the kernels and threads that its
parent has chosen, and one killed worker breaks all jobs of a pool. Kernel variants of the CPU are forked from a process
that has imported the libraries and chosen nothing (`consistency.launch.forked`); each makes sure of that, and is
started as all others are where it is not so. A worker takes the cases in turn, because it takes longer to import the
libraries than to check a small case; where a case ends the process, a new one takes the rest.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from consistency.capture import origin
from consistency.capture.claim import scratch_folder
from consistency.capture.folder import SCHEMA, CaptureManifest, worker_slug
from consistency.capture.node_group import NodeGroup, name_on
from consistency.capture.records import WorkerInfo
from consistency.capture.version import __version__
from consistency.capture.writer import CaptureWriter
from consistency.case import standard
from consistency.case.engine_file import EngineFile
from consistency.case.load_path import LoadPath
from consistency.case.stages import SPECS, stages_of
from consistency.devices.host import HostFacts, read_host, since
from consistency.errors import ConsistencyError
from consistency.launch.assignment import Assignment, Ended
from consistency.launch.engine import Captured, CaseTask, Limits, Task, Watcher
from consistency.launch.environment import shared_out, worker_threads
from consistency.launch.forked import Importers
from consistency.launch.plan import WorkerPlan, in_lanes, merged_waves, side_by_side
from consistency.launch.process import WorkerProcess, environment_of
from consistency.worker.protocol import REFERENCE_FILE, REFERENCE_LOST, Event, RankGroup, lost_rank

POLL_S = 0.05
_WAITED_FOR = stages_of(lambda spec: spec.feeds_inputs)
"""Stages of which one worker computes the float64 values for all."""


@dataclass(slots=True, kw_only=True)
class _OpenCase:
    """A case whose capture is being made."""

    task: CaseTask
    writer: CaptureWriter
    scratch: Path
    left: int
    """Workers that have not ended it."""
    before: HostFacts | None = None
    """Of the host when its first worker began."""
    error: ConsistencyError | None = None

    @property
    def plans(self) -> list[WorkerPlan]:
        return [plan for wave in self.task.waves for plan in wave]

    def assign(self, number: int, plan: WorkerPlan) -> Assignment:
        """Return what one of its workers has to do."""
        return Assignment(
            number=number,
            case=self.task.case,
            plan=plan,
            folder=self.writer.worker_folder(plan.slug),
            blobs=self.writer.blobs,
            scratch=self.scratch,
            fault=self.task.faults.get(plan.name),
        )

    def end(self, one: Assignment, ended: Ended) -> None:
        """Write down how one of its workers ended, for the capture and for the workers that wait for its reference."""
        self.left -= 1
        self.writer.write_worker(one.plan.slug, one.info(ended))
        one.tidy(ended.status)
        self.error = self.error or ended.error
        if one.plan.makes_reference and not (self.scratch / REFERENCE_FILE).exists():
            text = f"{one.plan.name}, which computes it, is lost: {ended.reason or 'it computed none'}"
            (self.scratch / REFERENCE_LOST).write_text(text, encoding="utf-8")
        if one.group is not None and ended.status != "ok":
            name = name_on(one.group.node, one.plan.name) if one.group.node else one.plan.name
            lost_rank(Path(one.group.folder), name).write_text(ended.reason or "", encoding="utf-8")

    def _engine(self, one: EngineFile) -> str:
        """Return the folder of an inference engine whose outputs a worker has judged; say so where none has."""
        slug = worker_slug(one.name, LoadPath.ISOLATED)
        if not (self.writer.worker_folder(slug) / "worker.json").exists():
            maker = next((plan.name for plan in self.plans if plan.makes_reference), "the reference worker")
            reason = f"its outputs were not judged: {maker} computed no float64 reference"
            (self.writer.worker_folder(slug) / "records.jsonl").touch()
            self.writer.write_worker(slug, WorkerInfo(
                architecture=one.name, model="", name=one.name, load_path=LoadPath.ISOLATED, status="lost",
                reason=reason, engine=one.name,
            ))  # fmt: skip
        return slug

    def close(self, after: HostFacts) -> Captured:
        """Commit the capture when the last worker has ended."""
        _remove(self.scratch)
        if self.error is not None:
            return Captured(task=self.task, error=self.error)
        judges = standard.FORWARD in self.task.case.stages
        engines = [self._engine(one) for one in self.task.case.engine_outputs if judges]
        manifest = CaptureManifest(
            schema=SCHEMA,
            tool=__version__,
            created=origin.now(),
            host=origin.host(),
            command=origin.command(),
            case=self.task.case,
            workers=(*(plan.slug for plan in self.plans), *engines),
            host_facts=since(self.before or after, after),
        )
        return Captured(task=self.task, captures=(self.writer.commit(manifest),))


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
                left = sum(map(len, one.waves))
                cases.append(_OpenCase(task=one, writer=writer, scratch=home, left=left))
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
    for number in {one.number for one in assigned}:
        of_case = [one for one in assigned if one.number == number]
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
                group = RankGroup(rank=rank, ranks=ranks, folder=str(one.scratch / name), timeout_s=stall_s / 2)
                if together is not None:
                    group = msgspec.structs.replace(
                        group, node=together.node, nodes=together.nodes, folder=str(Path(together.folder) / name)
                    )
                one.group, found[name] = group, ranks
    return found


class _Run:
    """The workers of a task, wave by wave."""

    def __init__(self, cases: Sequence[_OpenCase], limits: Limits, watch: Watcher, importers: Importers) -> None:
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
            [[self._cases[number].assign(number, plan) for number, plan in turns] for turns in wave]
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
        lanes = min(self._limits.cases_at_once, len({one.number for queue in queues for one in queue}))
        if self._limits.together is not None:
            lanes = 1  # a case that waits for other nodes must not begin long before theirs
        threads = {slug: own and max(1, own // lanes) for slug, own in self._threads(queues).items()}
        return in_lanes(queues, lanes, of=lambda one: one.number), threads

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
        case = self._cases[one.number]
        if case.before is None:
            case.before = self._host
            case.writer.reserve()
        if len(self._cases) > 1:
            turn = Event(
                at=time.time(), kind="case", message=one.case.name, done=one.number, total=len(self._cases)
            )  # fmt: skip
            self._watch(one.plan.label, turn)

    def _end(self, one: Assignment, ended: Ended) -> Captured | None:
        """Note how a worker's case ended; return the case if that was the last of its workers."""
        case = self._cases[one.number]
        case.end(one, ended)
        if ended.status != "ok":
            self._watch(one.plan.label, Event(at=time.time(), kind="failed", message=ended.reason or ""))
        if case.left and (case.error is None or len(self._cases) > 1):
            return None
        self._host = read_host(self._devices)
        return case.close(self._host)


def _remove(folder: Path) -> None:
    """Remove a scratch folder, of which a store of torch.distributed removes its own file once a rank has left."""
    while folder.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
