"""Assignments of cases to workers, seen from outside: the job, the events, and how the case ended."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from consistency.capture.json_codec import decode_json
from consistency.capture.names import DISK_FULL, EXCEEDED_TIMEOUT, SILENT
from consistency.capture.records import WorkerInfo, WorkerStatus
from consistency.case.case import Case
from consistency.case.tolerance import of_architecture
from consistency.devices.spec import DeviceIdentity
from consistency.errors import CaptureError, ConsistencyError, InputError, UnusableDeviceError, UsageError
from consistency.launch.change import Change
from consistency.launch.environment import torch_device
from consistency.launch.open_case import OpenCase
from consistency.launch.plan import WorkerPlan, settings_of
from consistency.launch.scheduler import Limits
from consistency.worker.protocol import (
    CANNOT_WRITE,
    DEVICE_FAILED,
    OUT_OF_MEMORY,
    REFERENCE_FILE,
    REFERENCE_LOST,
    STATE_FILE,
    Event,
    EventReader,
    Job,
    Peer,
    RankGroup,
    WorkerState,
)

JOBS = "jobs.json"
"""Name of the file with the jobs of a process, in the folder of the first."""

_LOST = {OUT_OF_MEMORY: "ran out of memory", DEVICE_FAILED: "its device failed"}
"""Why a worker is lost, by the kind of the error that it reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a worker's case ended."""

    status: WorkerStatus
    reason: str | None = None
    meaning: str = ""
    """Explanation of the reason, and what to do, where the reason is a device's own words."""
    error: ConsistencyError | None = None
    """The error that concerns more than the worker: the files are wrong."""


@dataclass(slots=True, kw_only=True)
class Assignment:
    """A case that a worker is to check, and what is known of it so far."""

    open_case: OpenCase
    plan: WorkerPlan
    group: RankGroup | None = None
    """The workers that it computes together with, once the waves are known."""
    folder: Path = field(init=False)
    """The worker's own folder, in the capture of the case."""
    reader: EventReader = field(init=False)
    began: bool = False
    """Whether there was any event."""
    done: bool = False
    """Whether the worker has reported that it has done the case."""
    last: str = "none"
    """The last event for people."""
    failure: dict[str, Any] | None = None
    """The error that the worker reported."""
    started: float = 0.0
    """When the worker turned to the case, by the monotonic clock."""
    last_event_at: float = 0.0
    out_of_memory_before: int = 0
    """Processes that the kernel had killed for want of memory by then."""

    def __post_init__(self) -> None:
        self.folder = self.open_case.writer.worker_folder(self.plan.slug)
        self.reader = EventReader(self.folder / "events.jsonl")

    @property
    def case(self) -> Case:
        return self.open_case.task.case

    @property
    def fault(self) -> str | None:
        """Return the fault to plant in this worker."""
        return self.open_case.task.faults.get(self.plan.name)

    def job(self, *, threads: int | None, parent_pid: int | None = None) -> Job:
        """Return the job as the worker reads it; its parent is this process, or one that forks it."""
        change = self.plan.change or Change()
        tolerance = of_architecture(self.case.tolerance, self.plan.info.architecture)
        if parent_pid is None:
            parent_pid = os.getpid()
        peers = (Peer(type=info.spec.type, settings=settings_of(info, self.case)) for info in self.plan.peers)
        return Job(
            case=msgspec.structs.replace(self.case, tolerance=tolerance),
            name=self.plan.name,
            device=torch_device(self.plan.info, self.plan.load_path),
            load_path=self.plan.load_path,
            folder=str(self.folder),
            blobs=str(self.open_case.writer.blobs),
            scratch=str(self.open_case.scratch),
            settings=self.plan.settings(self.case),
            makes_reference=self.plan.makes_reference,
            others_wait=self.plan.others_wait,
            threads=threads,
            alternative_paths=self.plan.alternative_paths,
            peers=tuple(peers),
            parent_pid=parent_pid,
            fault=self.fault,
            autocast_adapter_dtype=change.autocast_adapter_dtype is not False,
            uuid=self.plan.info.uuid,
            pci_bus_id=self.plan.info.pci_bus_id,
            unusable=self.plan.info.unusable,
            group=self.group,
        )

    def begin(self) -> None:
        """Start the clocks of the case: the worker turns to it now."""
        self.started = self.last_event_at = time.monotonic()
        self.out_of_memory_before = _out_of_memory_kills()

    def events(self) -> list[Event]:
        """Return the events since the last call, and note the end, the failure or the last step that they report."""
        events = self.reader.new()
        if events:
            self.last_event_at, self.began = time.monotonic(), True
        for event in events:
            if event.kind == "failed":
                self.failure = event.error
            elif event.kind == "done":
                self.done = True
            elif event.kind != "alive":
                self.last = str(event)
        return events

    def ended_without_exit(self) -> Ended | None:
        """Return how the case ended where the worker's process goes on with others; None where it has not ended so.

        A process goes on after a case that is done, or whose files cannot be used.
        """
        if self.done:
            return Ended(status="ok")
        if self.failure is None:
            return None
        ended = self._ended_by_error(self.failure)
        return None if ended.error is None else ended

    def over_limit(self, limits: Limits) -> str | None:
        """Return which limit the case exceeds, None while it exceeds none."""
        now = time.monotonic()
        if limits.timeout_s is not None and now - self.started > limits.timeout_s:
            return f"{EXCEEDED_TIMEOUT} {limits.timeout_s:g} s"
        if now - self.last_event_at > limits.stall_s:
            return f"{SILENT} for {limits.stall_s:g} s"
        return None

    def after_exit(self, status: int) -> Ended:
        """Return how the case ended, by the exit status of the worker's process."""
        if status == 0 and self.done:
            return Ended(status="ok")
        # a worker that cannot write its capture may not have been able to write its error either
        if status == CANNOT_WRITE:
            return self.lost(f"could not write its capture: {DISK_FULL}")
        if self.failure is not None:
            return self._ended_by_error(self.failure)
        if status < 0:
            return self._ended_by_signal(-status)
        reason = f"ended with exit status {status}"
        log_lines = self._read("log.txt").splitlines()
        if log_lines:
            reason += f" ({log_lines[-1][:300]})"
        return self.lost(reason)

    def _ended_by_signal(self, number: int) -> Ended:
        """Return that the worker was killed, and whether by the kernel for want of memory."""
        name = f"signal {number}"
        if number in set(signal.Signals):
            name = signal.Signals(number).name
        reason = f"killed by {name}"
        if number == signal.SIGKILL and _out_of_memory_kills() > self.out_of_memory_before:
            reason += ": out of memory, by the kernel"
        return self.lost(reason)

    def lost(self, reason: str, *, meaning: str = "") -> Ended:
        """Return that the worker is lost, with the reason and its last event."""
        return Ended(status="lost", reason=self._with_last(reason), meaning=meaning)

    def info(self, ended: Ended) -> WorkerInfo:
        """Return the record of the worker: its device as discovered, its own report, and how the case ended."""
        device = {name: getattr(self.plan.info, name) for name in DeviceIdentity.__struct_fields__}
        # a worker that ended early has written no state: what was discovered of its device has to do
        try:
            state = msgspec.structs.asdict(decode_json((self.folder / STATE_FILE).read_bytes(), WorkerState))
        except (OSError, msgspec.MsgspecError):
            state = {}
        environment = state.get("environment", {})
        device["uuid"] = device["uuid"] or environment.get("device_uuid")
        device["simulated"] = device["simulated"] or bool(environment.get("simulated"))
        reason = f"{ended.reason}: {ended.meaning}" if ended.meaning else ended.reason
        stack = None if ended.status == "ok" else self.stack()
        return WorkerInfo(
            **device,
            **state,
            name=self.plan.name,
            load_path=self.plan.load_path,
            status=ended.status,
            reason=reason,
            stack=stack,
            elapsed_s=round(time.monotonic() - self.started, 3),
            planted=self.fault,
        )

    def end(self, ended: Ended) -> None:
        """Write down how the case ended, for the capture and for the workers that wait for its reference."""
        case = self.open_case
        case.workers_left -= 1
        case.writer.write_worker(self.plan.slug, self.info(ended))
        self._tidy(ended.status)
        case.error = case.error or ended.error
        # without a word the others would wait for the reference until they exceed their limit
        if self.plan.makes_reference and not (case.scratch / REFERENCE_FILE).exists():
            message = f"{self.plan.name}, which computes it, is lost: {ended.reason or 'it computed none'}"
            (case.scratch / REFERENCE_LOST).write_text(message, encoding="utf-8")

    def _tidy(self, status: WorkerStatus) -> None:
        """Remove files that the capture does not need; the log of a lost worker stays, and all its events."""
        for name in (JOBS, STATE_FILE, "stack.txt"):
            (self.folder / name).unlink(missing_ok=True)
        if status == "ok":
            (self.folder / "log.txt").unlink(missing_ok=True)
            self.reader.drop("step", "alive")

    def stack(self) -> str | None:
        """Return the stack of the worker when it was killed or failed; None where it is not known."""
        if self.failure is not None:
            return self.failure.get("trace") or None
        return self._read("stack.txt") or None

    def _ended_by_error(self, error: dict[str, Any]) -> Ended:
        """Return how the case ended, by the error that the worker reported."""
        if error["kind"] == CaptureError.__name__:
            # what it recorded before is compared: the verdict of hours is not lost for want of room
            self.failure = {**error, "trace": ""}  # where in this tool it was writing helps nobody
            return self.lost(": ".join(filter(None, (error["what"], error.get("got")))))
        for kind in (InputError, UsageError):
            if error["kind"] == kind.__name__:
                facts = {name: error.get(name) for name in ("where", "got", "wanted", "hint")}
                raised = kind(error["what"], **facts)
                return Ended(status="failed", reason=raised.what, error=raised)
        if error["kind"] == UnusableDeviceError.__name__:
            reason = "; ".join(filter(None, (error["what"], error.get("hint"))))
            return Ended(status="failed", reason=reason)
        if error["kind"] in _LOST:
            return self.lost(f"{_LOST[error['kind']]}: {error['what']}", meaning=error["hint"])
        return Ended(status="failed", reason=self._with_last(error["what"]))

    def _with_last(self, reason: str) -> str:
        return f"{reason}; last event: {self.last}"

    def _read(self, name: str) -> str:
        """Return the text of a file of the worker, empty where there is none."""
        with suppress(OSError):
            return (self.folder / name).read_text(encoding="utf-8", errors="replace").strip()
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
