"""Read the condition of a device while it works: temperature, clocks, power, throttling, error counters.

A GPU is read through NVML, the CPU through the kernel. Nothing is raised: what cannot be read is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from consistency.devices.host import nvml as management
from consistency.devices.host.pci import read_text

Readings = dict[str, Any]
Library = Callable[[], AbstractContextManager[Any]]


def read_gpu(uuid: str | None, *, library: Library = management.library) -> tuple[Readings, str | None]:
    """Return what NVML reports of the GPU with this UUID, and None; or nothing, and the reason."""
    if uuid is None:
        return {}, "the device has no UUID by which NVML could find it"
    with library() as nvml:
        if nvml is None:
            return {}, "NVIDIA's management library does not answer"
        handle = management.handle_of_uuid(nvml, uuid)
        if handle is None:
            return {}, "NVIDIA's management library does not know the device"
        return management.condition(nvml, handle) | management.counters(nvml, handle), None


def read_cpu(root: Path = Path("/")) -> tuple[Readings, str | None]:
    """Return what the kernel reports of the processor and its memory, and None; or nothing, and the reason."""
    readings: Readings = {}
    cpus = root / "sys/devices/system/cpu"
    # Documentation/driver-api/thermal/sysfs-api.rst: millidegrees, which may be negative
    zones = [read_text(path) for path in sorted((root / "sys/class/thermal").glob("thermal_zone*/temp"))]
    degrees = [int(text) / 1000 for text in zones if text is not None and text.lstrip("-").isdigit()]
    if degrees:
        readings["temperature_c"] = max(degrees)
    # Documentation/admin-guide/pm/cpufreq.rst: kHz
    clocks = [kilohertz // 1000 for kilohertz in _numbers(sorted(cpus.glob("cpu*/cpufreq/scaling_cur_freq")))]
    if clocks:
        readings |= {"slowest_clock_mhz": min(clocks), "fastest_clock_mhz": max(clocks)}
    # Documentation/driver-api/edac.rst: corrected and uncorrected errors, by memory controller
    for kind, name in (("ce", "corrected"), ("ue", "uncorrected")):
        counts = _numbers((root / "sys/devices/system/edac/mc").glob(f"mc*/{kind}_count"))
        if counts:
            readings[f"memory errors, {name}"] = sum(counts)
    throttled = _numbers(cpus.glob("cpu*/thermal_throttle/package_throttle_count"))
    if throttled:
        readings["throttled, times since boot"] = max(throttled)
    reason = None if readings else "the kernel reports no temperature, clock or error counter of the processor"
    return readings, reason


def _numbers(paths: Iterable[Path]) -> list[int]:
    """Return the whole numbers in these files; files with another text, or none, are left out."""
    texts = [read_text(path) for path in paths]
    return [int(text) for text in texts if text is not None and text.isdigit()]
