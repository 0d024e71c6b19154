"""What a history keeps of a run, as values."""

from __future__ import annotations

import datetime
import hashlib
from typing import Any

import msgspec

from consistency.capture.json_codec import encode_json
from consistency.capture.wording import time_of
from consistency.numerics.real import Real

SCHEMA = "consistency.history/1"

FLEET_SCHEMA = "consistency.history/2"
"""Of a run whose workers are in a file of their own: earlier versions name it as unsupported and leave it out."""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One worker of a run.

    Attributes
    ----------
    device : str
        Identity that outlives the run: the device's UUID, or host and name, with the kernel variant.
    software : str
        Digest of versions, kernels and settings: bits are compared only between equal software.
    inputs : str
        Digest of the bytes in the files, the dtype and the inputs.
    bits : dict of str to str
        Digest of all tensors, by stage.
    table : str
        Name of the table with the digest of every tensor.
    drift : tuple of str
        Stages that differ bitwise from the earlier runs, where this has not been accepted.
    case : str
        The case of a suite; empty where the run has one case.
    verdict : str
        Of the device, as in `by_worker`; empty in runs of versions that did not record it.
    ratio : float or None
        Worst error/tolerance on the device.
    host : str
        Where it is not that of the run.
    driver : str
        Empty for a CPU, and in runs of versions that did not record it.
    """

    name: str
    load_path: str
    device: str
    architecture: str
    model: str
    status: str
    software: str
    inputs: str
    bits: dict[str, str] = {}
    table: str = ""
    drift: tuple[str, ...] = ()
    simulated: bool = False
    case: str = ""
    verdict: str = ""
    ratio: Real | None = None
    host: str = ""
    driver: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what the same worker has in every run: device, load path and case."""
        return (self.device, self.load_path, self.case)


class FleetWorkers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The workers of a fleet: where they are, and what a list of runs says of them.

    Attributes
    ----------
    file : str
        SHA-256 of the Parquet file, which is its name.
    drifted : tuple of str
        The first names of workers that drifted; `drifted_devices` is the number of all such devices.
    """

    file: str
    devices: int
    hosts: int
    lost: int = 0
    drifted: tuple[str, ...] = ()
    drifted_devices: int = 0
    simulated: bool = False


class GoneDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An accelerator that a host no longer has: identity, name and host; `last` is the time of the last run with it."""

    device: str
    name: str
    host: str
    last: str


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run.

    Attributes
    ----------
    case : str
        Name of the case, or of the suite.
    workers : tuple of WorkerRecord
        Empty for a fleet: `History.workers` reads them.
    cases : dict of str to str
        Verdict of each case of a suite; its `workers` are those of all cases.
    report : str
        Folder of the run's report, on its host; empty where none was kept.
    planted : bool
        A fault was planted on purpose.
    fleet : FleetWorkers or None
        None where the workers are in this record.
    auto : dict of str to dict
        By host whose devices `auto` chose: the user's variables that show a part of them.
    gone : tuple of GoneDevice
        Accelerators that these hosts had before, where that has not been accepted.
    """

    schema: str
    at: str
    host: str
    case: str
    verdict: str
    tool: str
    versions: dict[str, Any] = {}
    findings: tuple[str, ...] = ()
    workers: tuple[WorkerRecord, ...] = ()
    cases: dict[str, str] = {}
    report: str = ""
    planted: bool = False
    fleet: FleetWorkers | None = None
    auto: dict[str, dict[str, str]] = {}
    gone: tuple[GoneDevice, ...] = ()

    def __post_init__(self) -> None:
        if time_of(self.at) is None:
            raise ValueError(f"at is no time: {self.at!r}")

    @property
    def time(self) -> datetime.datetime:
        """Return when it ended, in UTC."""
        found = time_of(self.at)
        assert found is not None  # or there would be no record
        return found


Table = dict[str, str]
"""Digest of each tensor by `stage::layer.tensor`."""

WorkerState = tuple[str, str, str, str, int]
"""Device, load path, case and name of a worker, and a digest of all else that is recorded of it."""


def state_of(worker: WorkerRecord) -> int:
    """Return a digest of what a run saw of a worker: equal for workers, and runs, in which it saw the same."""
    seen = [getattr(worker, name) for name in _SEEN]
    return int.from_bytes(hashlib.blake2b(encode_json(seen), digest_size=8).digest(), "big")


def device_count(run: RunRecord) -> int:
    """Return the number of devices of a run."""
    return len({worker.device for worker in run.workers}) if run.fleet is None else run.fleet.devices


def is_simulated(run: RunRecord) -> bool:
    """Return whether a device of a run is simulated."""
    return any(worker.simulated for worker in run.workers) if run.fleet is None else run.fleet.simulated


def digest_of(value: Any) -> str:
    """Return a short digest of a JSON value."""
    return hashlib.blake2b(encode_json(value), digest_size=8).hexdigest()


_IDENTITY = ("name", "load_path", "device", "case", "host", "table")  # the table follows from the bits
_SEEN = tuple(name for name in WorkerRecord.__struct_fields__ if name not in _IDENTITY)
