"""What a device reports of itself while it works, from a made host and a made library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from consistency.devices.host.condition import read_cpu, read_gpu


def test_the_kernel_is_asked_for_a_processor(tmp_path: Path) -> None:
    files = {
        "sys/class/thermal/thermal_zone0/temp": "41000",
        "sys/class/thermal/thermal_zone1/temp": "73500",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1200000",
        "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "3400000",
        "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "7",
        "sys/devices/system/edac/mc/mc0/ce_count": "2",
        "sys/devices/system/edac/mc/mc1/ce_count": "1",
        "sys/devices/system/edac/mc/mc0/ue_count": "0",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert read_cpu(tmp_path) == (
        {
            "temperature_c": 73.5,
            "slowest_clock_mhz": 1200,
            "fastest_clock_mhz": 3400,
            "memory errors, corrected": 3,
            "memory errors, uncorrected": 0,
            "throttled, times since boot": 7,
        },
        None,
    )


def test_a_kernel_that_reports_nothing_is_said(tmp_path: Path) -> None:
    readings, reason = read_cpu(tmp_path)
    assert readings == {}
    assert reason is not None


class Nvml:
    """NVML with one GPU, which has no fan."""

    NVMLError = KeyError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - NVML's name
        return {"GPU-1": "handle"}[uuid]

    def nvmlDeviceGetTemperature(self, _handle: str, kind: int) -> int:  # noqa: N802 - as above
        return {0: 88}[kind]

    def nvmlDeviceGetClockInfo(self, _handle: str, kind: int) -> int:  # noqa: N802 - as above
        return {1: 1980, 2: 2619}[kind]

    def nvmlDeviceGetPowerUsage(self, _handle: str) -> int:  # noqa: N802 - as above
        return 698_500

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: str) -> int:  # noqa: N802 - as above
        return 0x04 | 0x20


@contextmanager
def library(nvml: Any = None) -> Iterator[Any]:
    yield nvml


def test_nvml_is_asked_for_a_gpu_by_its_uuid() -> None:
    readings, reason = read_gpu("1", library=lambda: library(Nvml()))  # torch leaves the prefix out
    assert reason is None
    assert readings == {
        "temperature_c": 88,
        "power_w": 698.5,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "throttle_reasons": ["power cap", "thermal, by software"],
    }
    assert read_gpu("GPU-1", library=lambda: library(Nvml()))[0] == readings


def test_a_gpu_that_cannot_be_asked_is_said() -> None:
    assert read_gpu(None)[1] == "the device has no UUID by which NVML could find it"
    assert read_gpu("GPU-1", library=library)[1] == "NVIDIA's management library does not answer"
    unknown = read_gpu("GPU-2", library=lambda: library(Nvml()))
    assert unknown == ({}, "NVIDIA's management library does not know the device")
