"""The protocol between parent and worker: jobs, events and the worker's own description. No torch here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.records import SettingChange, StageMemory
from consistency.capture.soak import Soak
from consistency.capture.whole_file import write_fully, write_whole
from consistency.case.budget.passes import Pass, part_of
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.errors import CaptureError

EventKind = Literal["case", "stage", "step", "wait", "done", "failed", "alive"]
"""`case` is the launcher's: the worker turns to the case of this name."""

REFERENCE_FILE = "reference.safetensors"
"""Name of the float64 activations in the scratch folder that all workers of a run share."""

GRADIENT_FILE = "gradient.safetensors"
"""Name of the float64 gradients there."""

GENERATION_FILE = "generation.safetensors"
"""Name of the exact logits there, of the texts that the reference's worker writes."""

TRAJECTORY_FILE = "trajectory.safetensors"
"""Name of the float64 trajectory of the adapter there."""

STEP_FILE = "trajectory-{}.safetensors"
"""Name of the float64 gradients of one of its steps there."""

DECISIONS_FILE = "decisions-{}.bin"
"""Name of the decisions of a stage there, which all workers are compared on."""

REFERENCE_LOST = "reference.lost"
"""Name of the file that the launcher writes there when the worker that makes them is lost."""

CANNOT_WRITE = 4
"""Exit status of a worker whose disk is full, so that it could not write an event."""

OUT_OF_MEMORY, DEVICE_FAILED = "OutOfMemory", "DeviceError"
"""Kinds of a reported error that are no class's name: the trouble of the device that ended the worker."""

STATE_FILE = "state.json"
"""Name of the file with a worker's `WorkerState`."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Another worker of the run: the type of its device, and the settings that it is asked for."""

    type: str
    settings: dict[str, Any]


class RankGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that a worker forms a group with, itself included."""

    rank: int
    """Number of this worker among them."""
    ranks: tuple[str, ...]
    """Names of the workers, in the order of their ranks."""
    folder: str
    """Folder where they meet, in the scratch folder of the case."""
    timeout_s: float
    """Seconds that a collective may take: half as long as a worker may be silent, so that a rank that waits for another
    can say so before it is taken for the silent one."""
    node: str = ""
    """Name of this node, where the workers of several nodes form the group: then `ranks` are this node's alone until
    all nodes have met (`consistency.extras.training.ranks.nodes`)."""
    nodes: tuple[str, ...] = ()
    """Names of all nodes, in the order of their ranks."""
    has_met: bool = False
    """Whether `ranks` are those of all nodes."""

    def part(self, first: int, size: int) -> RankGroup:
        """Return the group of `size` ranks from `first` on, of which this worker has to be one."""
        return msgspec.structs.replace(
            self, rank=self.rank - first, ranks=self.ranks[first : first + size], folder=f"{self.folder}-from-{first}"
        )


def lost_rank(folder: Path, name: str) -> Path:
    """Return the file in which the launcher says why a rank is lost."""
    return folder.parent / f"lost-{name.replace(':', '-')}"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a worker needs to know about one case."""

    case: Case
    name: str
    """The device as the user wrote it: `cuda:1@tf32`."""
    device: str
    """The device as torch numbers it in this worker: `cuda:0` where only one is visible."""
    load_path: str
    folder: str
    """The worker's own folder."""
    blobs: str
    """The folder of the capture's tensors."""
    scratch: str
    """A folder shared with the other workers of this run."""
    settings: dict[str, Any]
    """Determinism settings that differ from the profile's: the user's, and those of the device's variant."""
    makes_reference: bool
    """Whether this worker computes the float64 activations for all."""
    threads: int | None
    """Threads per operation; None leaves them as the environment has them."""
    parent_pid: int
    alternative_paths: tuple[LoadPath, ...] = ()
    """Load paths that the stage `adapter` checks besides `load_path`."""
    others_wait: bool = True
    """Whether other workers wait for the results of this one."""
    peers: tuple[Peer, ...] = ()
    """Every worker of the run, where this one computes the reference."""
    fault: str | None = None
    """A fault to plant, of `consistency.worker.faults`."""
    autocast_adapter_dtype: bool = True
    """PEFT's argument of this name for the default load path."""
    uuid: str | None = None
    """UUID of the device that was planned, where it is known."""
    pci_bus_id: str | None = None
    """PCI bus id of the device that was planned, where it is known."""
    unusable: str = ""
    """Why no process can use that device; empty unless it was found so."""
    group: RankGroup | None = None
    """The ranks that compute together with this worker; None where no other one on a device of its type runs beside
    it."""


STARTED, ENDED = "started", "ended"
"""Words before the numbers that are reported of a forked worker: its process, then its exit status."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a process that has imported the libraries to fork a worker; the worker's files come with it."""

    jobs: str
    """File with the jobs."""
    variables: dict[str, str]
    """Variables of the environment, to be set before the first operation."""


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a `WorkerInfo` that only the worker knows; rewritten after every stage."""

    environment: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    in_force: dict[str, Any] = {}
    kernel_key: str = ""
    changes: tuple[SettingChange, ...] = ()
    inputs_digest: str | None = None
    config: dict[str, Any] = {}
    sources: str = ""
    stages_done: tuple[str, ...] = ()
    peak_bytes: int | None = None
    stage_memory: tuple[StageMemory, ...] = ()
    soak: Soak | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a worker's progress.

    Attributes
    ----------
    at : float
        Time, in seconds since 1970.
    kind : str
        A case, a stage or a step of one begins; the worker waits, is alive, is done, or failed.
    done, total : int
        Number of steps of the stage that are done, and of all its steps.
    block, blocks : int
        Number of the block that a pass begins, from 1, and of all blocks; 0 where a step has none.
    share : float or None
        Fraction of the stage that is done; None where `done` of `total` is all that is known.
    message : str
        The worker's activity, in words.
    error : dict or None
        The parts of the error of a worker that failed.
    """

    at: float
    kind: EventKind
    stage: str = ""
    layer: str = ""
    done: int = 0
    total: int = 0
    block: int = 0
    blocks: int = 0
    share: float | None = None
    message: str = ""
    error: dict[str, Any] | None = None

    def __str__(self) -> str:
        parts = (self.stage, self.layer, self.block_text, self.message)
        return " · ".join(part for part in parts if part) or self.kind

    @property
    def block_text(self) -> str:
        """Return `block 3 of 24`; empty where the event is of no block."""
        return f"block {self.block} of {self.blocks}" if self.blocks else ""


_WHOLE_STAGE = (0.0, 1.0)
"""A part of a stage: the fractions of its work that are done before and after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step of a stage, which is written again with each block that begins in it."""

    layer: str = ""
    done: int = 0
    total: int = 0


class EventLog:
    """Append events to a worker's file; each is on disk before the next step begins.

    Attributes
    ----------
    is_on_cpu : bool
        Whether the worker computes on the CPU now: see `heartbeat`.
    """

    def __init__(self, path: Path, *, is_on_cpu: bool = False) -> None:
        self._file = path.open("ab", buffering=0)
        self._stage = ""
        self._step = _Step()
        self._part = _WHOLE_STAGE
        self._passes: tuple[Pass, ...] = ()
        self.is_on_cpu = is_on_cpu

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def stage(self, name: str, passes: Sequence[Pass] = ()) -> None:
        """Note a stage that begins, with the passes that it declares."""
        self._stage, self._step, self._part, self._passes = name, _Step(), _WHOLE_STAGE, tuple(passes)
        self._write(Event(at=time.time(), kind="stage", stage=name))

    def step(self, text: str, done: int, total: int) -> None:
        """Note a step that begins, when `done` of `total` steps of its kind are done."""
        self._step = _Step(layer=text, done=done, total=total)
        self._write_step(share=None if self._part == _WHOLE_STAGE else self._share_of_stage(0.0))

    def block(self, number: int, count: int, share_of_step: float | None = None) -> None:
        """Note a block of the model that begins, from 1, and the fraction of the step that is done, if known."""
        share = None if share_of_step is None else self._share_of_stage(share_of_step)
        self._write_step(block=number, blocks=count, share=share)

    @contextmanager
    def passes(self, title: str) -> Iterator[None]:
        """Count the steps of this context as the passes of this title, which the stage declares."""
        part = part_of(self._passes, title)
        with nullcontext() if part is None else self.part_of_stage(*part):
            yield

    @contextmanager
    def part_of_stage(self, first: float, last: float) -> Iterator[None]:
        """Count the steps of this context as a part of the stage, or of the part that is counted already.

        Parameters
        ----------
        first, last : float
            Fractions of the stage, or of that part, that are done before and after.
        """
        before = start, end = self._part
        self._part = (start + (end - start) * first, start + (end - start) * last)
        try:
            yield
        finally:
            self._part = before

    def wait(self, message: str) -> None:
        self._write(Event(at=time.time(), kind="wait", stage=self._stage, message=message))

    def alive(self) -> None:
        self._write(Event(at=time.time(), kind="alive"))

    @contextmanager
    def on_cpu(self) -> Iterator[None]:
        """Let an accelerator's worker count as one on the CPU within a `with` block."""
        before, self.is_on_cpu = self.is_on_cpu, True
        try:
            yield
        finally:
            self.is_on_cpu = before

    def done(self) -> None:
        self._write(Event(at=time.time(), kind="done"))

    def failed(self, error: Mapping[str, Any]) -> None:
        self._write(Event(at=time.time(), kind="failed", stage=self._stage, error=dict(error)))

    def _share_of_stage(self, share_of_step: float) -> float | None:
        """Return the fraction of the stage that is done, by that of the step; None if the number of steps is unknown.

        The steps fill the current part of the stage.
        """
        if not self._step.total:
            return None
        start, end = self._part
        share_of_part = min(1.0, (self._step.done + share_of_step) / self._step.total)
        return round(start + (end - start) * share_of_part, 6)

    def _write_step(self, *, block: int = 0, blocks: int = 0, share: float | None) -> None:
        step = self._step
        event = Event(
            at=time.time(),
            kind="step",
            stage=self._stage,
            layer=step.layer,
            done=step.done,
            total=step.total,
            block=block,
            blocks=blocks,
            share=share,
        )
        self._write(event)

    def _write(self, event: Event) -> None:
        write_fully(self._file.fileno(), encode_json(event) + b"\n")


class EventReader:
    """Read the events that a worker has written since the last call.

    A line that is no event is passed over: only that line is lost, and no other worker is disturbed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[Event]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                raw = file.read()
        except FileNotFoundError:
            return []
        whole_lines = raw[: raw.rfind(b"\n") + 1]  # the last line may be written in part
        self._offset += len(whole_lines)
        events = [_event(line) for line in whole_lines.split(b"\n")]
        return [event for event in events if event is not None]

    def drop(self, *kinds: EventKind) -> None:
        """Remove the events of these kinds from the file, once its writer has ended."""
        with suppress(OSError, msgspec.MsgspecError, CaptureError):  # the longer file does no harm
            lines = self._path.read_bytes().splitlines(keepends=True)
            write_whole(self._path, [line for line in lines if decode_json(line, Event).kind not in kinds])


def _event(line: bytes) -> Event | None:
    """Return the event in a line, None where it is none."""
    try:
        return decode_json(line, Event)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
