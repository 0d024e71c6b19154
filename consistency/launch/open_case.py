"""One case of a task while its capture is being made, as all of its workers share it."""

from __future__ import annotations

import itertools
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from consistency.capture import origin
from consistency.capture.folder import SCHEMA, CaptureManifest, worker_slug
from consistency.capture.records import WorkerInfo
from consistency.capture.version import __version__
from consistency.capture.writer import CaptureWriter
from consistency.case import standard
from consistency.case.load_path import LoadPath
from consistency.devices.host import HostFacts, since
from consistency.errors import ConsistencyError
from consistency.launch.plan import WorkerPlan
from consistency.launch.scheduler import Captured, CaseTask


@dataclass(slots=True, kw_only=True)
class OpenCase:
    """A case whose capture is being made; every worker's assignment refers to it."""

    number: int
    """The place of the case in its task."""
    task: CaseTask
    writer: CaptureWriter
    scratch: Path
    """A folder that the workers of the case share, and that no other case uses."""
    workers_left: int = field(init=False)
    """How many workers have not ended the case."""
    before: HostFacts | None = None
    """The facts of the host when its first worker began."""
    error: ConsistencyError | None = None
    """The error that a worker found in the files of the case: there is no capture then."""

    def __post_init__(self) -> None:
        self.workers_left = len(self.plans)

    @property
    def plans(self) -> list[WorkerPlan]:
        """The workers of the case."""
        return list(itertools.chain.from_iterable(self.task.waves))

    def close(self, after: HostFacts) -> Captured:
        """Commit the capture when the last worker has ended; without one, return the error of the case."""
        remove_scratch(self.scratch)
        if self.error is not None:
            return Captured(task=self.task, error=self.error)
        engines: list[str] = []
        if standard.FORWARD in self.task.case.stages:  # a worker judges outputs of engines there
            engines += [self._engine_folder(output.name) for output in self.task.case.engine_outputs]
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

    def _engine_folder(self, name: str) -> str:
        """Return the name of the folder of an inference engine, whose outputs a worker has judged.

        Where none has judged them, the engine is written as a lost worker.
        """
        slug = worker_slug(name, LoadPath.ISOLATED)
        if (self.writer.worker_folder(slug) / "worker.json").exists():
            return slug
        maker = next((plan.name for plan in self.plans if plan.makes_reference), "the reference worker")
        info = WorkerInfo(
            architecture=name,
            model="",
            name=name,
            load_path=LoadPath.ISOLATED,
            status="lost",
            reason=f"its outputs were not judged: {maker} computed no float64 reference",
            engine=name,
        )
        (self.writer.worker_folder(slug) / "records.jsonl").touch()
        self.writer.write_worker(slug, info)
        return slug


def remove_scratch(folder: Path) -> None:
    """Remove a scratch folder, even while a store of torch.distributed removes its own file: a rank has just left."""
    while folder.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
