"""One worker's process, seen from outside: start it, follow its events, end it, and report how it ended."""

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

from consistency.capture.json_codec import decode_json
from consistency.capture.records import WorkerInfo, WorkerStatus
from consistency.capture.writer import CaptureWriter, cannot_write, write_json
from consistency.case.case import Case
from consistency.devices.interpreter import python_command
from consistency.devices.spec import DeviceIdentity
from consistency.errors import CaptureError, ConsistencyError, InputError, UsageError
from consistency.launch.change import Change
from consistency.launch.engine import Limits
from consistency.launch.environment import torch_device, worker_environment
from consistency.launch.plan import WorkerPlan
from consistency.worker.protocol import CANNOT_WRITE, STATE_FILE, Event, EventReader, Job, WorkerState

POLL_S = 0.05
DUMP_GRACE_S = 2.0  # faulthandler writes its stacks in milliseconds, unless the process is stopped or swapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a worker ended; `error` concerns the whole run: the files are wrong, the disk is full."""

    status: WorkerStatus
    reason: str | None = None
    error: ConsistencyError | None = None


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """A worker's process; `last` is its last event for people, `failure` the error that it reported."""

    plan: WorkerPlan
    folder: Path
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    reader: EventReader
    fault: str | None
    out_of_memory_before: int
    started: float = field(default_factory=time.monotonic)
    last_event_at: float = field(default_factory=time.monotonic)
    last: str = "none"
    failure: dict[str, Any] | None = None

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
            raise cannot_write(folder, error) from None
        before = _out_of_memory_kills()
        process = subprocess.Popen(
            [*python_command(), "consistency.worker", str(folder / "job.json")],
            stdin=subprocess.PIPE,  # held open: the worker ends when its parent is gone and this closes
            stdout=log,
            stderr=subprocess.STDOUT,
            env=worker_environment(plan.info, plan.load_path, threads=threads, change=change.environment),
            start_new_session=True,  # Ctrl-C goes to the parent alone, and the whole group can be killed
        )
        reader = EventReader(folder / "events.jsonl")
        return cls(
            plan=plan, folder=folder, process=process, log=log, reader=reader, fault=fault, out_of_memory_before=before
        )

    def events(self) -> list[Event]:
        """Return the events since the last call."""
        found = self.reader.new()
        if found:
            self.last_event_at = time.monotonic()
        for event in found:
            if event.kind == "failed":
                self.failure = event.error
            elif event.kind != "done":
                self.last = str(event)
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
        elif now - self.last_event_at > limits.stall_s:
            limit = f"gave no sign of life for {limits.stall_s:g} s"
        else:
            return None
        self._dump_stack()
        self.kill()
        return self._lost(f"{limit} and was killed")

    def kill(self) -> None:
        """Kill the worker and every process that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def info(self, ended: Ended) -> WorkerInfo:
        """Return what identifies the worker: its device as discovered, what it reported, and how it ended."""
        device = {name: getattr(self.plan.info, name) for name in DeviceIdentity.__struct_fields__}
        try:
            state = msgspec.structs.asdict(decode_json((self.folder / STATE_FILE).read_bytes(), WorkerState))
        except (OSError, msgspec.MsgspecError):
            state = {}
        environment = state.get("environment", {})
        device["uuid"] = device["uuid"] or environment.get("device_uuid")
        device["simulated"] = device["simulated"] or bool(environment.get("simulated"))
        return WorkerInfo(
            **device,
            **state,
            name=self.plan.name,
            load_path=self.plan.load_path,
            status=ended.status,
            reason=ended.reason,
            stack=None if ended.status == "ok" else self._stack(),
            elapsed_s=round(time.monotonic() - self.started, 3),
            planted=self.fault,
        )

    def tidy(self, status: WorkerStatus) -> None:
        """Remove what the capture does not need; the log of a lost worker stays, and all its events."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        self.log.close()
        for name in ("job.json", STATE_FILE, "stack.txt", *(("log.txt",) if status == "ok" else ())):
            (self.folder / name).unlink(missing_ok=True)
        if status == "ok":
            self.reader.drop("step")

    def _after_exit(self, status: int) -> Ended:
        if status == 0:
            return Ended(status="ok")
        if status == CANNOT_WRITE:
            full = CaptureError("cannot write the capture: is the disk full?", where=self.folder)
            return Ended(status="failed", reason=full.what, error=full)
        if self.failure is not None:
            return self._failed(self.failure)
        if status < 0:
            number = -status
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            starved = number == signal.SIGKILL and _out_of_memory_kills() > self.out_of_memory_before
            return self._lost(f"was killed by {name}" + (": out of memory, by the kernel" if starved else ""))
        tail = self._read("log.txt").splitlines()[-1:]
        return self._lost(f"ended with exit status {status}" + "".join(f" ({line[:300]})" for line in tail))

    def _failed(self, error: dict[str, Any]) -> Ended:
        for kind in (InputError, UsageError, CaptureError):
            if error["kind"] == kind.__name__:
                facts = {name: error.get(name) for name in ("where", "got", "wanted", "hint")}
                found = kind(error["what"], **facts)
                return Ended(status="failed", reason=found.what, error=found)
        if error["kind"] == "OutOfMemory":
            return self._lost("ran out of memory")
        return Ended(status="failed", reason=self._with_last(error["what"]))

    def _lost(self, reason: str) -> Ended:
        return Ended(status="lost", reason=self._with_last(reason))

    def _with_last(self, reason: str) -> str:
        return f"{reason}; last event: {self.last}"

    def _dump_stack(self) -> None:
        """Have `faulthandler` write where the worker is, unless it has done so already."""
        if not hasattr(signal, "SIGUSR1") or self._stack():
            return
        with suppress(ProcessLookupError, PermissionError):
            self.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + DUMP_GRACE_S
        while time.monotonic() < until and self.process.poll() is None and not self._stack():
            time.sleep(POLL_S)

    def _stack(self) -> str | None:
        return (self._read("stack.txt") if self.failure is None else self.failure.get("trace")) or None

    def _read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""


def _out_of_memory_kills() -> int:
    """Return how many processes of this control group the kernel has killed because memory ran out."""
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        try:
            for line in path.read_text(encoding="ascii").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        except (OSError, ValueError):
            continue
    return 0
