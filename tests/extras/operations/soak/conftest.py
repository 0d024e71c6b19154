"""A soak of a worker in this process, whose clock counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consistency.capture.records import TensorRecord
from consistency.capture.soak import Soak, SoakedStage
from consistency.extras.operations.soak import soaking
from consistency.worker import session
from consistency.worker.protocol import WorkerState
from tests.worker.conftest import Look

SoakOf = Callable[..., Soak]


@dataclass(slots=True)
class Left:
    """What a worker has left: its last state, and its records if it ended well."""

    soak: Soak | None = None
    records: list[TensorRecord] = field(default_factory=list)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Left:
    found = Left()

    def write(_: Path, state: WorkerState) -> None:
        found.soak = state.soak

    monkeypatch.setattr(session, "write_json", write)
    return found


@pytest.fixture
def soak_of(look: Look, left: Left, monkeypatch: pytest.MonkeyPatch) -> SoakOf:
    """Run a worker's session with a soak; a second passes at every look at the clock."""

    def run(base: Path | str, adapter: Path | str | None, *, soak_s: float, **changes: Any) -> Soak:
        seconds = itertools.count()
        monkeypatch.setattr(soaking, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
        left.records = look(base, adapter, soak_s=soak_s, **changes)
        assert left.soak is not None
        return left.soak

    return run


def of(soak: Soak, stage: str) -> SoakedStage:
    """Return one stage of a soak."""
    return next(one for one in soak.stages if one.stage == stage)
