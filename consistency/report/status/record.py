"""`status.json`: what monitoring needs of a run, in a small file beside its report, written last."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from consistency.numerics.real import Real

SCHEMA = "consistency.status/1"

StatusVerdict = Literal["consistent", "inconsistent", "unchecked", "incomplete"]

EXIT_STATUS: Mapping[StatusVerdict, int] = {"consistent": 0, "inconsistent": 1, "unchecked": 2, "incomplete": 3}
"""Of a run with this verdict; `unchecked` is that of a suite none of whose cases could be checked."""

CLOCK_SKEW_S = 300.0
"""A result may be this far in the future: clocks of hosts that synchronise at all differ by less."""


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One device on all load paths, and in all cases of a suite.

    Attributes
    ----------
    verdict : str
        As in `comparison/by_worker.py`.
    ratio : float or None
        Worst error/tolerance.
    """

    name: str
    host: str
    architecture: str
    model: str
    uuid: str | None
    verdict: StatusVerdict
    ratio: Real | None = None
    simulated: bool = False


class DeviceClass(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one model with the same verdict.

    Attributes
    ----------
    count : int
        How many there are.
    ratio : float or None
        Worst error/tolerance of any of them.
    """

    architecture: str
    model: str
    verdict: StatusVerdict
    count: int
    ratio: Real | None = None
    simulated: bool = False


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run or a suite.

    Attributes
    ----------
    created : datetime
        When it ended, with the zone UTC; where captures were compared, when the oldest was made.
    exit_status : int
        Of the run.
    sentence : str
        The verdict in one sentence.
    reason : str
        Message of the first error, or of the first warning where there is no error; empty without either.
    marks : tuple of str
        What keeps the result from describing hardware: simulated devices, a planted fault.
    findings : dict of str to int
        Number of findings by severity.
    accepted : int
        Findings that the baseline accepts.
    workers : dict of str to int
        Number of workers by status.
    devices : tuple of DeviceStatus
        All devices of few; of many, one by one, those that are not consistent.
    device_classes : tuple of DeviceClass
        All devices, counted.
    devices_left_out : int
        Consistent devices of many, which are in `device_classes` alone.
    cases : dict of str to str
        Verdict of each case of a suite; empty for a run.
    command : tuple of str
        The command line, word by word.
    """

    schema: str
    tool: str
    created: Annotated[datetime.datetime, msgspec.Meta(tz=True)]
    host: str
    case: str
    verdict: StatusVerdict
    exit_status: int
    sentence: str
    reason: str
    marks: tuple[str, ...]
    profile: str
    settings: tuple[str, ...]
    elapsed_s: float | None
    ratio: Real | None
    findings: dict[str, int]
    accepted: int
    workers: dict[str, int]
    devices: tuple[DeviceStatus, ...]
    device_classes: tuple[DeviceClass, ...] = ()
    devices_left_out: int = 0
    cases: dict[str, StatusVerdict] = {}
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.exit_status != EXIT_STATUS[self.verdict]:
            raise ValueError(f"{self.verdict} with the exit status {self.exit_status}")

    def age_s(self, now: datetime.datetime) -> float:
        """Return the time since it ended; negative where the clock that wrote it was ahead."""
        return (now - self.created).total_seconds()
