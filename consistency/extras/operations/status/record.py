"""The contents of `status.json`: the result of a run for monitoring, a small file beside the report, written last."""

from __future__ import annotations

import datetime
from typing import Annotated

import msgspec

from consistency.comparison.kinds import EXIT_STATUS, SuiteVerdict
from consistency.numerics.real import Real

SCHEMA = "consistency.status/1"

CLOCK_SKEW_S = 300.0
"""A result may be this far in the future: clocks of hosts that synchronise at all differ by less."""


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one device, on all load paths and in all cases of a suite."""

    name: str
    host: str
    architecture: str
    model: str
    uuid: str | None
    verdict: SuiteVerdict  # as in `comparison/by_worker.py`
    ratio: Real | None = None  # worst error/tolerance
    simulated: bool = False


class DeviceClass(msgspec.Struct, frozen=True, kw_only=True):
    """The result that all devices of one model with the same verdict have."""

    architecture: str
    model: str
    verdict: SuiteVerdict
    count: int  # how many there are
    ratio: Real | None = None  # worst error/tolerance of any of them
    simulated: bool = False


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run or a suite."""

    schema: str
    tool: str
    # end of the run, with the zone UTC; where captures were compared, the time when the oldest was made
    created: Annotated[datetime.datetime, msgspec.Meta(tz=True)]
    host: str
    case: str
    verdict: SuiteVerdict
    exit_status: int  # of the run
    sentence: str  # the verdict in one sentence
    reason: str  # message of the first error, or of the first warning where there is no error; empty without either
    marks: tuple[str, ...]  # why the result does not describe hardware: simulated devices, a planted fault
    profile: str
    settings: tuple[str, ...]
    elapsed_s: float | None
    ratio: Real | None
    findings: dict[str, int]  # number of findings by severity
    accepted: int  # findings that the baseline accepts
    workers: dict[str, int]  # number of workers by status
    devices: tuple[DeviceStatus, ...]  # all devices; of many, only those that are not consistent
    device_classes: tuple[DeviceClass, ...] = ()  # all devices, counted by model and verdict
    devices_left_out: int = 0  # consistent devices, where there are many: they are only in `device_classes`
    cases: dict[str, SuiteVerdict] = {}  # verdict of each case of a suite; empty for a run
    command: tuple[str, ...] = ()  # the command line, word by word

    def __post_init__(self) -> None:
        if self.exit_status != EXIT_STATUS[self.verdict]:
            raise ValueError(f"{self.verdict} with the exit status {self.exit_status}")

    def age_s(self, now: datetime.datetime) -> float:
        """Return the seconds since the run ended; negative where the clock of its host was ahead."""
        return (now - self.created).total_seconds()
