from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from consistency.worker.memory import per_stage
from consistency.worker.memory.host_memory import reset_peak, resident_bytes
from consistency.worker.memory.per_stage import StageMemoryLog

SIZE = 2**26
MOST = SIZE * 9 // 10  # the kernel adds up resident pages in batches per processor, so its figures lag a little

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux lets a process reset its high-water mark"
)


def take() -> None:
    """Touch fresh pages, and give them back; what the C library has kept from other tests is none."""
    with mmap.mmap(-1, SIZE) as fresh:
        fresh.write(b"1" * SIZE)


def test_what_a_stage_takes_and_gives_back_is_its_own_peak() -> None:
    log = StageMemoryLog(torch.device("cpu"))
    log.begin()
    before = resident_bytes()
    take()
    first = log.end("one")
    log.begin()
    second = log.end("two")
    assert (first.stage, second.stage) == ("one", "two")
    assert first.host_peak_bytes >= before + MOST
    assert second.host_peak_bytes < first.host_peak_bytes - MOST
    assert first.host_resident_bytes < first.host_peak_bytes
    assert (first.device_resident_bytes, first.device_peak_bytes) == (None, None)
    assert log.peak_bytes >= first.host_peak_bytes, "the whole run's peak is not lost with the mark"


def test_memory_that_maps_a_file_is_not_private(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"1" * SIZE)
    log = StageMemoryLog(torch.device("cpu"))
    before = log.end("one").host_private_bytes
    mapped = np.memmap(tmp_path / "weights", dtype=np.uint8, mode="c")
    assert mapped.max()
    read = log.end("two").host_private_bytes
    mapped[:] = 2
    written = log.end("three").host_private_bytes
    assert before is not None
    assert read is not None
    assert written is not None
    assert read < before + MOST <= written


def test_a_stage_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_s, processor_s = iter([0.0, 10.0, 13.0]), iter([0.0, 5.0, 9.0])
    clock = SimpleNamespace(monotonic=lambda: next(wall_s), process_time=lambda: next(processor_s))
    monkeypatch.setattr(per_stage, "time", clock)
    log = StageMemoryLog(torch.device("cpu"))
    log.begin()
    taken = log.end("one")
    assert (taken.elapsed_s, taken.processor_s) == (3.0, 4.0)


def test_a_mark_that_is_reset_within_a_stage_is_not_lost() -> None:
    log = StageMemoryLog(torch.device("cpu"))
    log.begin()
    before = resident_bytes()
    take()
    log.keep()
    assert reset_peak()
    assert log.end("one").host_peak_bytes >= before + MOST
