"""Memory of this process and of the host, by what the system itself reports."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from consistency.worker.memory import host_memory

MIB = 2**20
LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux reports this in /proc")


def told(code: str) -> list[int]:
    """Return the figures that a process prints, which starts with nothing of this one's memory."""
    start = "from consistency.worker.memory.host_memory import peak_bytes, resident_bytes, reset_peak\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.splitlines()]


@pytest.mark.process
@LINUX
def test_the_peak_of_a_process_is_not_that_of_its_parent() -> None:
    ours = np.ones(2**25)  # 256 MiB that this process holds and the other does not
    (peak,) = told("print(peak_bytes())")
    assert MIB < peak < ours.nbytes


@pytest.mark.process
def test_what_is_taken_counts() -> None:
    (peak,) = told("taken = bytearray(b'x') * (100 * 2**20); print(peak_bytes())")
    assert peak > 100 * MIB


@pytest.mark.process
@LINUX
def test_what_was_given_back_is_in_the_peak_until_it_is_reset() -> None:
    before, held, after, peak, reset, again = told(
        "print(resident_bytes())\n"
        "taken = bytearray(b'x') * (100 * 2**20)\n"
        "print(resident_bytes())\n"
        "del taken\n"
        "print(resident_bytes()); print(peak_bytes())\n"
        "print(int(reset_peak())); print(peak_bytes())\n"
    )
    assert held - before > 99 * MIB
    assert held - after > 99 * MIB
    assert peak > held - MIB  # Linux counts pages in batches, and sums them up less exactly than it reports them
    if not reset:
        pytest.skip("this system does not let a process reset its mark")
    assert after - 8 * MIB < again < peak - 90 * MIB


@LINUX
def test_the_host_has_no_more_to_give_than_it_has() -> None:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = host_memory.available_bytes()
    assert available is not None
    assert 0 < available <= int(fields["MemTotal"].split()[0]) * 1024


def test_a_system_without_proc_reports_its_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_field", lambda *_: None)
    unit = 1 if sys.platform == "darwin" else 1024
    least = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert least <= host_memory.peak_bytes() <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert host_memory.resident_bytes() == host_memory.peak_bytes()
    assert host_memory.available_bytes() is None


def free(device: str, monkeypatch: pytest.MonkeyPatch, *modules: Callable[..., object]) -> int | None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 5 * MIB)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(**{m.__name__: m for m in modules}))
    return host_memory.free_bytes(torch.device(device))


def test_free_memory_is_the_devices_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def mem_get_info(device: torch.device) -> tuple[int, int]:
        return (3 + (device.index or 0)) * MIB, 100 * MIB

    assert free("cpu", monkeypatch, mem_get_info) == 5 * MIB
    assert free("cuda:1", monkeypatch, mem_get_info) == 4 * MIB
    assert free("cuda:1", monkeypatch) is None
