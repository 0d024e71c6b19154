"""How many processors there are to share out: those of the process, less what a container's quota leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from consistency.devices import cores
from consistency.devices.cores import available_cores, is_host_busy, threads_per_worker


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 8)
    assert [threads_per_worker(n) for n in (1, 2, 3, 8, 9, 0)] == [8, 4, 2, 1, 1, 8]


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000\n", 16),
        ("400000 100000\n", 4),
        ("250000 100000\n", 2),  # two and a half processors: a third thread would be throttled
        ("50000 100000\n", 1),
        ("9900000 100000\n", 16),
        ("damaged", 16),
        (None, 16),
    ],
)
def test_the_quota_of_a_container_is_respected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str | None, expected: int
) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota)
    monkeypatch.setattr(cores, "QUOTA", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert available_cores() == expected


def test_without_affinity_the_processors_of_the_machine_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "none")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores() == 1


@pytest.mark.parametrize(("load", "busy"), [(0.0, False), (4.0, False), (4.1, True), (None, False)])
def test_a_host_is_busy_where_more_than_half_of_its_cores_compute(
    load: float | None, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def averages() -> tuple[float, float, float]:
        if load is None:
            raise OSError
        return load, 9.0, 9.0

    monkeypatch.setattr(os, "getloadavg", averages)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert is_host_busy.__wrapped__() is busy
