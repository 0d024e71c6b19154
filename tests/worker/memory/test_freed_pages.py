"""What the C library keeps for reuse goes back to the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from consistency.worker.memory.mapped_pages import _malloc_trim, trim

MIB = 2**20


@pytest.mark.process
@pytest.mark.skipif(_malloc_trim() is None, reason="only glibc gives pages back on request")
def test_what_a_worker_freed_is_resident_until_it_is_given_back() -> None:
    script = (
        "from consistency.worker.memory.mapped_pages import trim\n"
        "from consistency.worker.memory.host_memory import resident_bytes\n"
        "buffers = [bytearray(b'x') * (50 * 2**20) for _ in range(2)]; last = bytearray(b'x') * 2**20\n"
        "del buffers; print(resident_bytes()); trim(); print(resident_bytes())"
    )
    keeps = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}  # as a worker is started
    environment = {**os.environ, **keeps}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    kept, given_back = map(int, done.stdout.split())
    assert kept - given_back > 90 * MIB


def test_without_such_a_library_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def __init__(self, _: object) -> None: ...

    monkeypatch.setattr("ctypes.CDLL", Other)
    _malloc_trim.cache_clear()
    assert _malloc_trim() is None
    trim()
    _malloc_trim.cache_clear()
