"""What a history keeps of a run, as values."""

from __future__ import annotations

import datetime
import hashlib
from typing import Any

import msgspec

from consistency.capture.json_codec import encode_json
from consistency.capture.wording import time_of
from consistency.comparison.history.run_workers import RunWorkers

SCHEMA = "consistency.history/2"

MOST_APART = 64
"""Devices with a row and a finding each: more than any one host has. Of more, those that are alike share one."""


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
        found = time_of(self.at)
        assert found is not None  # or there would be no record
        return found


Table = dict[str, str]
"""Digest of each tensor by `stage::layer.tensor`."""


def digest_of(value: Any) -> str:
    """Return a short digest of a JSON value."""
    return hashlib.blake2b(encode_json(value), digest_size=8).hexdigest()
