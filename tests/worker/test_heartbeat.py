"""Signs of life: while the CPU computes, and only then."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from consistency.worker.heartbeat import Heartbeat
from consistency.worker.protocol import EventLog, EventReader


def beats_while(path: Path, busy: bool, *, is_on_cpu: bool, until: int = 2) -> int:
    """Return how many signs of life came until there were enough, or a second had passed."""
    reader, found, end = EventReader(path), 0, time.monotonic() + 1
    with EventLog(path, is_on_cpu=is_on_cpu) as log, Heartbeat(log, every_s=0.05):
        while found < until and time.monotonic() < end:
            if busy:
                sum(range(100_000))
            else:
                time.sleep(0.05)
            found += sum(event.kind == "alive" for event in reader.new())
    return found


def test_a_computation_gives_signs_of_life(tmp_path: Path) -> None:
    assert beats_while(tmp_path / "events.jsonl", busy=True, is_on_cpu=True) >= 2


@pytest.mark.parametrize(("busy", "is_on_cpu"), [(False, True), (True, False)])
def test_a_deadlock_or_a_wait_for_a_device_gives_none(tmp_path: Path, busy: bool, is_on_cpu: bool) -> None:
    assert beats_while(tmp_path / "events.jsonl", busy=busy, is_on_cpu=is_on_cpu) == 0


def test_the_thread_ends_with_the_case(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log, Heartbeat(log):
        assert any(thread.name == "consistency-heartbeat" for thread in threading.enumerate())
    assert not any(thread.name == "consistency-heartbeat" for thread in threading.enumerate())


def test_what_an_accelerators_worker_computes_on_the_cpu_counts(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        with log.on_cpu():
            assert log.is_on_cpu
        assert not log.is_on_cpu
