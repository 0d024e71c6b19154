"""What a device reports of itself while it works: temperature, clocks, power, throttling, error counters.

Of a GPU NVML is asked, of the CPU the kernel. Nothing is raised: what cannot be read is absent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from consistency.devices.host import nvml as management
from consistency.devices.host.pci import read_text

Readings = dict[str, Any]
Library = Callable[[], AbstractContextManager[Any]]


def read_gpu(uuid: str | None, *, library: Library = management.library) -> tuple[Readings, str | None]:
    """Return what NVML reports of the GPU with this UUID, or nothing and the reason."""
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
    """Return what the kernel reports of the processor and its memory, or nothing and the reason."""
    found: Readings = {}
    zones = [read_text(path) for path in sorted((root / "sys/class/thermal").glob("thermal_zone*/temp"))]
    degrees = [int(text) / 1000 for text in zones if text is not None and text.lstrip("-").isdigit()]
    if degrees:  # Documentation/driver-api/thermal/sysfs-api.rst: millidegrees
        found["temperature_c"] = max(degrees)
    texts = [
        read_text(path) for path in sorted((root / "sys/devices/system/cpu").glob("cpu*/cpufreq/scaling_cur_freq"))
    ]
    clocks = [int(text) // 1000 for text in texts if text is not None and text.isdigit()]
    if clocks:  # Documentation/admin-guide/pm/cpufreq.rst: kHz
        found |= {"slowest_clock_mhz": min(clocks), "fastest_clock_mhz": max(clocks)}
    for kind, name in (("ce", "corrected"), ("ue", "uncorrected")):
        counts = [read_text(path) for path in (root / "sys/devices/system/edac/mc").glob(f"mc*/{kind}_count")]
        known = [int(text) for text in counts if text is not None and text.isdigit()]
        if known:  # Documentation/driver-api/edac.rst
            found[f"memory errors, {name}"] = sum(known)
    throttled = [
        read_text(path)
        for path in (root / "sys/devices/system/cpu").glob("cpu*/thermal_throttle/package_throttle_count")
    ]
    times = [int(text) for text in throttled if text is not None and text.isdigit()]
    if times:
        found["throttled, times since boot"] = max(times)
    return found, None if found else "the kernel reports no temperature, clock or error counter of the processor"
