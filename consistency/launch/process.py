"""One worker's process, seen from outside: start it, follow it, end it, and say how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from consistency.capture.folder import CaptureWriter, write_json
from consistency.capture.json_codec import decode_json
from consistency.capture.records import WorkerInfo, WorkerStatus
from consistency.case.case import Case
from consistency.devices.interpreter import python_command
from consistency.devices.spec import DeviceInfo
from consistency.errors import CaptureError, ConsistencyError, InputError, UsageError
from consistency.launch.change import Change
from consistency.launch.environment import torch_device, worker_environment
from consistency.launch.plan import WorkerPlan
from consistency.worker.protocol import CANNOT_WRITE, TOLD_FILE, Event, EventReader, Job, Told

POLL_S = 0.05
DUMP_GRACE_S = 2.0  # faulthandler writes its stacks in milliseconds, unless the process is stopped or swapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a worker may take, in seconds.

    Attributes
    ----------
    timeout_s : float or None
        From its start to its end.
    stall_s : float
        From one sign of life to the next.
    threads : int or None
        Threads per worker; None shares the processors out.
    """

    timeout_s: float | None = None
    stall_s: float = 300.0
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a worker ended.

    Attributes
    ----------
    error : ConsistencyError or None
        An error that concerns the whole run: the files are wrong, the disk is full.
    """

    status: WorkerStatus
    reason: str | None = None
    error: ConsistencyError | None = None


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """A worker's process, seen from outside."""

    plan: WorkerPlan
    folder: Path
    process: subprocess.Popen[bytes]
    reader: EventReader
    log: IO[bytes]
    out_of_memory_before: int
    fault: str | None = None
    started: float = field(default_factory=time.monotonic)
    last_sign: float = field(default_factory=time.monotonic)
    last_event: Event | None = None
    failure: Event | None = None

    @classmethod
    def start(
        cls, case: Case, plan: WorkerPlan, writer: CaptureWriter, scratch: Path, *, threads: int, fault: str | None
    ) -> WorkerProcess:
        folder = writer.worker_folder(plan.slug)
        variant = plan.info.spec.numerical_variant()
        change = plan.change or Change()
        job = Job(
            case=case,
            name=plan.name,
            device=torch_device(plan.info, plan.load_path),
            load_path=plan.load_path,
            folder=str(folder),
            blobs=str(writer.blobs),
            scratch=str(scratch),
            settings={**({} if variant is None else variant.settings), **change.settings},
            makes_reference=plan.makes_reference,
            threads=threads,
            alternative_paths=plan.alternative_paths,
            parent_pid=os.getpid(),
            fault=fault,
            autocast_adapter_dtype=change.autocast_adapter_dtype is not False,
        )
        write_json(folder / "job.json", job)
        try:
            log = (folder / "log.txt").open("wb")
        except OSError as error:
            raise CaptureError("cannot write the capture", where=folder, got=error) from None
        process = subprocess.Popen(
            [*python_command(), "consistency.worker", str(folder / "job.json")],
            stdin=subprocess.PIPE,  # held open: the worker ends when its parent is gone and this closes
            stdout=log,
            stderr=subprocess.STDOUT,
            env=worker_environment(plan.info, plan.load_path, threads=threads, change=change.environment),
            start_new_session=True,  # Ctrl-C goes to the parent alone, and the whole group can be killed
        )
        return cls(
            plan=plan,
            folder=folder,
            process=process,
            reader=EventReader(folder / "events.jsonl"),
            log=log,
            out_of_memory_before=_out_of_memory_kills(),
            fault=fault,
        )

    def events(self) -> list[Event]:
        found = self.reader.new()
        if found:
            self.last_sign = time.monotonic()
        for event in found:
            if event.kind == "failed":
                self.failure = event
            elif event.kind != "done":
                self.last_event = event
        return found

    def ended(self, limits: Limits) -> Ended | None:
        """Return how the worker ended, None while it runs; kill it when it takes too long."""
        status = self.process.poll()
        if status is not None:
            self.events()
            return self._after_exit(status)
        now = time.monotonic()
        if limits.timeout_s is not None and now - self.started > limits.timeout_s:
            limit = f"took longer than {limits.timeout_s:g} s"
        elif now - self.last_sign > limits.stall_s:
            limit = f"gave no sign of life for {limits.stall_s:g} s"
        else:
            return None
        self._dump_stack()
        self.kill()
        return Ended(status="lost", reason=f"{limit} and was killed; last event: {self._last()}")

    def kill(self) -> None:
        """Kill the worker and whatever it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def info(self, ended: Ended) -> WorkerInfo:
        told = self._told()
        device: DeviceInfo = self.plan.info
        environment: dict[str, Any] = {} if told is None else dict(told.environment)
        return WorkerInfo(
            name=self.plan.name,
            load_path=self.plan.load_path,
            architecture=device.architecture,
            model=device.model,
            status=ended.status,
            uuid=device.uuid or environment.get("device_uuid"),
            pci_bus_id=device.pci_bus_id,
            driver=device.driver,
            capability=device.capability,
            simulated=device.simulated or bool(environment.get("simulated")),
            reason=ended.reason,
            stack=None if ended.status == "ok" else self._stack(),
            environment=environment,
            asked={} if told is None else told.asked,
            in_force={} if told is None else told.in_force,
            changes=() if told is None else told.changes,
            inputs_digest=None if told is None else told.inputs_digest,
            stages_done=() if told is None else told.stages_done,
            kernel_key="" if told is None else told.kernel_key,
            elapsed_s=round(time.monotonic() - self.started, 3),
            peak_bytes=None if told is None else told.peak_bytes,
            planted=self.fault,
            stage_memory=() if told is None else told.stage_memory,
        )

    def tidy(self, status: WorkerStatus) -> None:
        """Remove what the capture does not need; a lost worker's log stays, and every step that it took."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        self.log.close()
        for name in ("job.json", TOLD_FILE, "stack.txt", *(("log.txt",) if status == "ok" else ())):
            (self.folder / name).unlink(missing_ok=True)
        if status == "ok":
            self.reader.drop("step")

    def _after_exit(self, status: int) -> Ended:
        if status == 0:
            return Ended(status="ok")
        if status == CANNOT_WRITE:
            error = CaptureError("cannot write the capture: is the disk full?", where=self.folder)
            return Ended(status="failed", reason=error.what, error=error)
        if self.failure is not None and self.failure.error is not None:
            return self._failed(self.failure.error)
        if status < 0:
            number = -status
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            memory = number == signal.SIGKILL and _out_of_memory_kills() > self.out_of_memory_before
            cause = f"was killed by {name}" + (": out of memory, by the kernel" if memory else "")
        else:
            cause = f"ended with exit status {status}"
            tail = self._log_tail()
            cause += f" ({tail})" if tail else ""
        return Ended(status="lost", reason=f"{cause}; last event: {self._last()}")

    def _failed(self, error: dict[str, Any]) -> Ended:
        kinds: dict[str, type[ConsistencyError]] = {
            kind.__name__: kind for kind in (InputError, UsageError, CaptureError)
        }
        kind = kinds.get(str(error.get("kind")))
        if kind is not None:
            found = kind(
                str(error["what"]),
                where=error.get("where"),
                got=error.get("got"),
                wanted=error.get("wanted"),
                hint=error.get("hint"),
            )
            return Ended(status="failed", reason=found.what, error=found)
        if error.get("kind") == "OutOfMemory":
            return Ended(status="lost", reason=f"ran out of memory; last event: {self._last()}")
        return Ended(status="failed", reason=f"{error.get('what')}; last event: {self._last()}")

    def _dump_stack(self) -> None:
        if not hasattr(signal, "SIGUSR1") or self._stack():
            return
        with suppress(ProcessLookupError, PermissionError):
            self.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + DUMP_GRACE_S
        while time.monotonic() < until and self.process.poll() is None:
            time.sleep(POLL_S)
            if self._stack():
                return

    def _last(self) -> str:
        return "none" if self.last_event is None else str(self.last_event)

    def _stack(self) -> str | None:
        if self.failure is not None and self.failure.error is not None:
            return str(self.failure.error.get("trace") or "") or None
        try:
            return (self.folder / "stack.txt").read_text(encoding="utf-8", errors="replace").strip() or None
        except OSError:
            return None

    def _log_tail(self) -> str:
        try:
            text = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""
        return text.splitlines()[-1][:300] if text else ""

    def _told(self) -> Told | None:
        try:
            return decode_json((self.folder / TOLD_FILE).read_bytes(), Told)
        except (OSError, msgspec.MsgspecError):
            return None


def _out_of_memory_kills() -> int:
    """Return how often the kernel has killed a process of this control group for want of memory."""
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        try:
            for line in path.read_text(encoding="ascii").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        except (OSError, ValueError):
            continue
    return 0
