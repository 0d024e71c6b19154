"""The records that a history keeps: a run, its workers, and what was observed of them."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Self

import msgspec

from consistency.capture.json_codec import encode_json
from consistency.capture.wording import time_of
from consistency.numerics.real import Real


class Observation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run saw of a worker, without what identifies the device."""

    load_path: str
    architecture: str
    model: str
    status: str
    software: str  # digest of versions, kernels and settings: bits are compared only between equal software
    inputs: str  # digest of the bytes in the files, the dtype and the inputs
    bits: dict[str, str] = {}  # digest of all tensors, by stage
    table: str = ""  # name of the table with the digest of every tensor
    drift: tuple[str, ...] = ()  # stages that differ bitwise from the earlier runs, where this has not been accepted
    simulated: bool = False
    case: str = ""  # the case of a suite; empty where the run has one case
    verdict: str = ""  # verdict of the device, as in `by_worker`
    ratio: Real | None = None  # worst error/tolerance on the device
    driver: str = ""  # empty for a CPU

    @property
    def state(self) -> bytes:
        """Return bytes that are equal for workers, and for runs, in which the same was observed."""
        return encode_json([getattr(self, name) for name in _STATE_FIELDS])


class WorkerRecord(Observation, frozen=True, kw_only=True, omit_defaults=True):
    """One worker of a run."""

    name: str
    device: str  # identity that outlives the run: the device's UUID, or host and name, with the kernel variant
    host: str = ""  # empty where it is the host of the run

    @property
    def key(self) -> WorkerKey:
        return (self.device, self.load_path, self.case)


WorkerKey = tuple[str, str, str]
"""Device, load path and case: what identifies a worker in every run."""


class RunWorkers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The workers of a run. Thousands of workers of a fleet share a few observations, which are stored once."""

    seen: tuple[Observation, ...] = ()  # different observations
    # a row for each worker: name, identity, host where it is not that of the run, and the place in `seen`
    rows: tuple[tuple[str, str, str, int], ...] = ()

    def __post_init__(self) -> None:
        for name, _, _, place in self.rows:
            if not 0 <= place < len(self.seen):
                raise ValueError(f"nothing was seen of the worker {name}")

    @classmethod
    def of(cls, records: Iterable[WorkerRecord]) -> Self:
        """Make the rows of records, in their order."""
        # place in `seen` of each observation, by its bytes: dicts within make an observation unhashable
        places: dict[bytes, int] = {}
        observations: list[Observation] = []
        rows = []
        for record in records:
            observation = Observation(**_observation_fields(record))
            place = places.setdefault(encode_json(observation), len(observations))
            if place == len(observations):
                observations.append(observation)
            rows.append((record.name, record.device, record.host, place))
        return cls(seen=tuple(observations), rows=tuple(rows))

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self.select())

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, devices: Collection[str] | None = None, **having: Collection[str]) -> list[WorkerRecord]:
        """Return the workers of some devices (identities or names; None: all) `having` these values of fields.

        `select({"cuda:0"}, inputs={digest})` returns the workers on `cuda:0` with these inputs.
        """
        # few observations are tested, not thousands of rows
        fields_by_place: dict[int, dict[str, Any]] = {}
        for place, observation in enumerate(self.seen):
            if all(getattr(observation, name) in values for name, values in having.items()):
                fields_by_place[place] = _observation_fields(observation)
        return [
            WorkerRecord(name=name, device=device, host=host, **fields_by_place[place])
            for name, device, host, place in self.rows
            if place in fields_by_place and (devices is None or device in devices or name in devices)
        ]

    @property
    def observed(self) -> Iterator[tuple[WorkerKey, str, Observation]]:
        """Yield the key, the name and the observation of each worker."""
        for name, device, _, place in self.rows:
            observation = self.seen[place]
            yield (device, observation.load_path, observation.case), name, observation

    @property
    def devices(self) -> set[str]:
        """Return the identities of all devices."""
        return {device for _, device, _, _ in self.rows}

    @property
    def hosts(self) -> set[str]:
        """Return the hosts; that of the run is an empty text."""
        return {host for _, _, host, _ in self.rows}

    @property
    def drifted(self) -> dict[str, str]:
        """Return the names of the devices that drifted, by identity."""
        return {key[0]: name for key, name, observation in self.observed if observation.drift}

    @property
    def lost(self) -> int:
        """Return the number of workers that were lost."""
        return sum(observation.status != "ok" for _, _, observation in self.observed)

    @property
    def is_simulated(self) -> bool:
        """Return whether a device is simulated."""
        return any(observation.simulated for observation in self.seen)


_FIELDS = Observation.__struct_fields__
_STATE_FIELDS = tuple(
    name for name in _FIELDS if name not in ("load_path", "case", "table")
)  # the table follows from bits


def _observation_fields(observation: Observation) -> dict[str, Any]:
    """Return the fields of an observation; of a `WorkerRecord`, those that it shares with one."""
    return {name: getattr(observation, name) for name in _FIELDS}


SCHEMA = "consistency.history/2"

MOST_APART = 64
"""Devices that have a row and a finding each: more than any one host has. Of more devices, equal ones share one."""


class GoneDevice(msgspec.Struct, frozen=True, kw_only=True):
    """An accelerator that a host no longer has: identity, name and host; `last` is the time of the last run with it."""

    device: str
    name: str
    host: str
    last: str


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run."""

    schema: str
    at: str
    host: str
    case: str  # name of the case, or of the suite
    verdict: str
    tool: str
    versions: dict[str, Any] = {}
    findings: tuple[str, ...] = ()
    workers: RunWorkers = RunWorkers()  # of a suite, those of all cases
    cases: dict[str, str] = {}  # verdict of each case of a suite
    report: str = ""  # folder of the run's report, on its host; empty where none was kept
    planted: bool = False  # a fault was planted on purpose
    # by host whose devices `auto` chose: the user's variables that show a part of them
    auto: dict[str, dict[str, str]] = {}
    gone: tuple[GoneDevice, ...] = ()  # accelerators that these hosts had before, where that has not been accepted

    def __post_init__(self) -> None:
        if time_of(self.at) is None:
            raise ValueError(f"at is no time: {self.at!r}")

    @property
    def time(self) -> datetime.datetime:
        """Return when it ended, in UTC."""
        ended = time_of(self.at)
        assert ended is not None  # `__post_init__` refuses such a record
        return ended


Table = dict[str, str]
"""Digest of each tensor by `stage::layer.tensor`."""


def digest_of(value: Any) -> str:
    """Return a short digest of a JSON value."""
    return hashlib.blake2b(encode_json(value), digest_size=8).hexdigest()
