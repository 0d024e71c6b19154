"""Signs of life: while the CPU computes, and only then."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from consistency.worker.heartbeat import Heartbeat
from consistency.worker.protocol import EventLog, EventReader

_BUFFER = bytearray(2048)
Act = Callable[[], None]


def beats_while(path: Path, act: Act, *, is_on_cpu: bool, until: int = 2) -> int:
    """Return how many signs of life came until there were enough, or a second had passed."""
    reader, found, end = EventReader(path), 0, time.monotonic() + 1
    with EventLog(path, is_on_cpu=is_on_cpu) as log, Heartbeat(log, every_s=0.05):
        while found < until and time.monotonic() < end:
            act()
            found += sum(event.kind == "alive" for event in reader.new())
    return found


def compute() -> None:
    sum(range(100_000))


def sleep() -> None:
    time.sleep(0.05)


def touch_memory() -> None:
    """Touch memory slowly, as mapped weights arrive from a disk, with next to no processor time."""
    with mmap.mmap(-1, 1 << 20) as memory:
        memory.write(bytes(1 << 20))
    time.sleep(0.05)


def read_file() -> None:
    with Path(__file__).open("rb", buffering=0) as file:  # into the same small buffer each time
        for _ in range(300):
            file.seek(0)
            file.readinto(_BUFFER)
    time.sleep(0.01)


@pytest.mark.parametrize(
    ("act", "is_on_cpu", "gives_signs"),
    [
        (compute, True, True),
        (touch_memory, False, True),  # what an accelerator's worker does itself
        (read_file, False, True),
        (sleep, True, False),  # a deadlock
        (sleep, False, False),
        (compute, False, False),  # a wait for a device takes processor time, and no memory
    ],
)
def test_what_is_done_gives_signs_of_life_and_a_wait_gives_none(
    tmp_path: Path, act: Act, is_on_cpu: bool, gives_signs: bool
) -> None:
    beats = beats_while(tmp_path / "events.jsonl", act, is_on_cpu=is_on_cpu)
    assert beats >= 2 if gives_signs else beats == 0


def test_the_thread_ends_with_the_case(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log, Heartbeat(log):
        assert any(thread.name == "consistency-heartbeat" for thread in threading.enumerate())
    assert not any(thread.name == "consistency-heartbeat" for thread in threading.enumerate())


def test_what_an_accelerators_worker_computes_on_the_cpu_counts(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        with log.on_cpu():
            assert log.is_on_cpu
        assert not log.is_on_cpu
