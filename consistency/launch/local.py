"""Run one plain subprocess per device and load path on this host, and write their capture.

Neither forkserver nor a process pool: with a preloaded torch the workers silently keep the parent's kernel choice and
thread count, and one killed worker breaks all jobs of a pool.
"""

from __future__ import annotations

import datetime
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from consistency.capture.folder import SCHEMA, CaptureManifest
from consistency.capture.version import __version__
from consistency.capture.writer import CaptureWriter
from consistency.devices.cores import threads_per_worker
from consistency.devices.host import read_host, since
from consistency.launch.engine import Captured, Task, Watcher
from consistency.launch.plan import WorkerPlan
from consistency.launch.process import POLL_S, WorkerProcess
from consistency.worker.protocol import REFERENCE_FILE, REFERENCE_LOST, Event


class LocalEngine:
    """Run every worker on this host."""

    def capture(self, task: Task, target: Path, *, watch: Watcher, replace: bool = False) -> Captured:
        plans = [plan for wave in task.waves for plan in wave]
        devices = list({plan.name: plan.info for plan in plans}.values())
        with (
            CaptureWriter(target, replace=replace) as writer,
            tempfile.TemporaryDirectory(prefix="consistency-") as scratch,
        ):
            before = read_host(devices)
            for wave in task.waves:
                _run_wave(task, wave, writer, Path(scratch), watch)
            manifest = CaptureManifest(
                schema=SCHEMA,
                tool=__version__,
                created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                host=platform.node(),
                case=task.case,
                workers=tuple(plan.slug for plan in plans),
                host_facts=since(before, read_host(devices)),
            )
            return Captured(captures=(writer.commit(manifest),))


def _run_wave(task: Task, wave: Sequence[WorkerPlan], writer: CaptureWriter, scratch: Path, watch: Watcher) -> None:
    threads = task.limits.threads or threads_per_worker(len(wave))
    running: list[WorkerProcess] = []
    try:
        for plan in wave:
            fault = task.faults.get(plan.name)
            running.append(WorkerProcess.start(task.case, plan, writer, scratch, threads=threads, fault=fault))
        while running:
            for worker in list(running):
                plan = worker.plan
                for event in worker.events():
                    watch(plan.label, event)
                ended = worker.ended(task.limits)
                if ended is None:
                    continue
                running.remove(worker)
                writer.write_worker(plan.slug, worker.info(ended))
                worker.tidy(ended.status)
                if ended.status != "ok":
                    watch(plan.label, Event(at=time.time(), kind="failed", message=ended.reason or ""))
                if plan.makes_reference and not (scratch / REFERENCE_FILE).exists():
                    text = f"{plan.name}, which computes it, is lost: {ended.reason or 'it computed none'}"
                    (scratch / REFERENCE_LOST).write_text(text, encoding="utf-8")
                if ended.error is not None:
                    raise ended.error
            time.sleep(POLL_S)
    finally:
        for worker in running:
            worker.kill()
