"""Start one plain subprocess per device and road on this machine, watch it, and say how it ended.

Neither forkserver nor a process pool: with a preloaded torch the workers silently keep the parent's kernel choice and
thread count, and one killed worker breaks all jobs of a pool.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from consistency.capture.folder import CaptureWriter
from consistency.case.case import Case
from consistency.devices.cores import threads_per_worker
from consistency.launch.plan import WorkerPlan
from consistency.launch.process import POLL_S, Limits, WorkerProcess
from consistency.worker.protocol import REFERENCE_FILE, REFERENCE_LOST, Event

Watcher = Callable[[WorkerPlan, Event], None]


def run_workers(
    case: Case,
    waves: Sequence[Sequence[WorkerPlan]],
    writer: CaptureWriter,
    *,
    limits: Limits,
    watch: Watcher,
    faults: Mapping[str, str],
) -> tuple[str, ...]:
    """Run every worker, and write who each was and how it ended into the capture.

    Returns
    -------
    tuple of str
        The slugs of the workers, for the manifest.

    Raises
    ------
    InputError, UsageError, CaptureError
        What a worker found wrong with the case's files, or could not write.
    """
    with tempfile.TemporaryDirectory(prefix="consistency-") as scratch:
        slugs: list[str] = []
        for wave in waves:
            threads = limits.threads or threads_per_worker(len(wave))
            _run_wave(case, wave, writer, Path(scratch), limits=limits, threads=threads, watch=watch, faults=faults)
            slugs += [plan.slug for plan in wave]
    return tuple(slugs)


def _run_wave(
    case: Case,
    wave: Sequence[WorkerPlan],
    writer: CaptureWriter,
    scratch: Path,
    *,
    limits: Limits,
    threads: int,
    watch: Watcher,
    faults: Mapping[str, str],
) -> None:
    running: list[WorkerProcess] = []
    try:
        for plan in wave:
            running.append(
                WorkerProcess.start(case, plan, writer, scratch, threads=threads, fault=faults.get(plan.name))
            )
        while running:
            for worker in list(running):
                for event in worker.events():
                    watch(worker.plan, event)
                ended = worker.ended(limits)
                if ended is None:
                    continue
                running.remove(worker)
                info = worker.info(ended)
                writer.write_worker(worker.plan.slug, info)
                worker.tidy(info.status)
                if info.status != "ok":
                    watch(worker.plan, Event(at=time.time(), kind="failed", message=info.reason or ""))
                if worker.plan.makes_reference and not (scratch / REFERENCE_FILE).exists():
                    (scratch / REFERENCE_LOST).write_text(
                        f"{worker.plan.name}, which makes it, is gone: {info.reason or 'it made none'}",
                        encoding="utf-8",
                    )
                if ended.error is not None:
                    raise ended.error
            time.sleep(POLL_S)
    finally:
        for worker in running:
            worker.kill()
