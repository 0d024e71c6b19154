"""The workers of a run, of one host or of a fleet: those that recorded the same are one cohort.

A cohort names its members by their numbers in a roster, the list of a run's devices. Rosters hardly change from run to
run, so they have files of their own, which runs share: a run of 8000 devices of four kinds takes 2 kB.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Self

import msgspec

from consistency.capture.json_codec import encode_json
from consistency.numerics.real import Real


class Observation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, weakref=True):
    """What a run saw of a worker, without what identifies the device.

    Attributes
    ----------
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
        Of the device, as in `by_worker`.
    ratio : float or None
        Worst error/tolerance on the device.
    driver : str
        Empty for a CPU.
    """

    load_path: str
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
    driver: str = ""

    @property
    def state(self) -> int:
        """Return a digest: equal for workers, and runs, in which the same was seen."""
        seen = [getattr(self, name) for name in _SEEN]
        return int.from_bytes(hashlib.blake2b(encode_json(seen), digest_size=8).digest(), "big")


class WorkerRecord(Observation, frozen=True, kw_only=True, omit_defaults=True):
    """One worker of a run.

    Attributes
    ----------
    device : str
        Identity that outlives the run: the device's UUID, or host and name, with the kernel variant.
    host : str
        Where it is not that of the run.
    """

    name: str
    device: str
    host: str = ""

    @property
    def key(self) -> WorkerKey:
        return (self.device, self.load_path, self.case)


WorkerKey = tuple[str, str, str]
"""What the same worker has in every run: device, load path and case."""


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of runs: names, identities, and hosts where they are not that of the run."""

    names: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[tuple[str, str, str]]) -> Self:
        names, devices, hosts = tuple(zip(*entries, strict=True)) or ((), (), ())
        return cls(names=names, devices=devices, hosts=hosts)

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        return zip(self.names, self.devices, self.hosts, strict=True)

    def __len__(self) -> int:
        return len(self.names)


class ObservedCohort(Observation, frozen=True, kw_only=True, omit_defaults=True):
    """Workers that recorded the same; `members` are the first and the last number of each range in the roster."""

    members: tuple[tuple[int, int], ...]


class RunWorkers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The workers of a run.

    Iteration goes through the roster once for each pair of case and load path.

    Attributes
    ----------
    file : str
        SHA-256 of the roster's file, which is its name; empty before the run is in a history.
    roster : Roster
        Not in the file of the run. It may list devices that this run does not have.
    """

    file: str = ""
    cohorts: tuple[ObservedCohort, ...] = ()
    roster: Roster = Roster()

    @classmethod
    def of(cls, records: Iterable[WorkerRecord], roster: Roster | None = None) -> Self:
        """Make cohorts of records; devices that are not in the roster are added to it."""
        numbers = {entry: number for number, entry in enumerate(roster or ())}
        members: dict[bytes, list[int]] = {}
        first: dict[bytes, WorkerRecord] = {}
        for record in records:
            entry = (record.name, record.device, record.host)
            seen = encode_json([getattr(record, name) for name in _OBSERVED])
            first.setdefault(seen, record)
            members.setdefault(seen, []).append(numbers.setdefault(entry, len(numbers)))
        cohorts = (ObservedCohort(**_observed(first[seen]), members=_ranges(found)) for seen, found in members.items())
        return cls(cohorts=tuple(cohorts), roster=Roster.of(numbers))

    def on(self, roster: Roster) -> Self:
        """Return these workers with their roster.

        Raises
        ------
        ValueError
            It has no such members.
        """
        for cohort in self.cohorts:
            size = 0
            for first, last in cohort.members:
                if not 0 <= first <= last < len(roster):
                    raise ValueError(f"a roster of {len(roster)} devices has no members {first} to {last}")
                size += last - first + 1
            if size > len(roster):
                raise ValueError(f"a roster of {len(roster)} devices has no {size} members")
        return msgspec.structs.replace(self, roster=roster)

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self.select())

    def __len__(self) -> int:
        return sum(map(_size, self.cohorts))

    def select(self, devices: Collection[str] | None = None, **having: Collection[str]) -> list[WorkerRecord]:
        """Return the workers of some devices (identities or names; None: all) `having` these values of fields."""
        roster = self.roster
        series: dict[tuple[str, str], list[tuple[int, WorkerRecord]]] = {}
        for cohort in self.cohorts:
            if not all(getattr(cohort, name) in values for name, values in having.items()):
                continue
            observed = _observed(cohort)
            chosen = series.setdefault((cohort.case, cohort.load_path), [])
            for first, last in cohort.members:
                for number in range(first, last + 1):
                    name, device = roster.names[number], roster.devices[number]
                    if devices is None or device in devices or name in devices:
                        worker = WorkerRecord(name=name, device=device, host=roster.hosts[number], **observed)
                        chosen.append((number, worker))
        return [worker for chosen in series.values() for _, worker in sorted(chosen, key=operator.itemgetter(0))]

    def members(self, cohort: ObservedCohort) -> Iterator[tuple[str, str]]:
        """Yield identity and name of each device of a cohort."""
        places = [slice(first, last + 1) for first, last in cohort.members]
        devices, names = ([column[place] for place in places] for column in (self.roster.devices, self.roster.names))
        return zip(itertools.chain(*devices), itertools.chain(*names), strict=True)

    @property
    def keys(self) -> Iterator[WorkerKey]:
        """Yield what the workers have in every run."""
        for cohort in self.cohorts:
            for device, _ in self.members(cohort):
                yield device, cohort.load_path, cohort.case

    @property
    def devices(self) -> set[str]:
        """Return the identities of all devices."""
        return self._distinct(self.roster.devices)

    @property
    def hosts(self) -> set[str]:
        """Return the hosts; that of the run is an empty text."""
        return self._distinct(self.roster.hosts)

    def _distinct(self, column: tuple[str, ...]) -> set[str]:
        places = (place for cohort in self.cohorts for place in cohort.members)
        return set().union(*(column[first : last + 1] for first, last in places))

    @property
    def drifted(self) -> dict[str, str]:
        """Return the names of the devices that drifted, by identity."""
        of_them = msgspec.structs.replace(self, cohorts=tuple(cohort for cohort in self.cohorts if cohort.drift))
        return {worker.device: worker.name for worker in of_them}

    @property
    def lost(self) -> int:
        """Return the number of workers that were lost."""
        return sum(_size(cohort) for cohort in self.cohorts if cohort.status != "ok")

    @property
    def is_simulated(self) -> bool:
        """Return whether a device is simulated."""
        return any(cohort.simulated for cohort in self.cohorts)


_OBSERVED = Observation.__struct_fields__
_SEEN = tuple(name for name in _OBSERVED if name not in ("load_path", "case", "table"))  # the table follows from bits


def _observed(observation: Observation) -> dict[str, Any]:
    return {name: getattr(observation, name) for name in _OBSERVED}


def _size(cohort: ObservedCohort) -> int:
    return sum(last - first + 1 for first, last in cohort.members)


def _ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)
