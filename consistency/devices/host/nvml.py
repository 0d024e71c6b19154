"""What NVIDIA's management library reports of a host: counters, NVLink, and how two GPUs reach each other."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

# nvml.h: nvmlGpuTopologyLevel_t, as named by `nvidia-smi topo -m`
_TOPOLOGY = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

# the driver's words for nvmlGpuP2PStatus_t of nvml.h
_PEER = {
    0: "ok",
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "no path in the topology",
    4: "switched off by a registry key",
    5: "not supported",
    6: "unknown",
}

# nvml.h: nvmlGpuP2PCapsIndex_t. In `pynvml` a stray comma makes the first name a tuple, so numbers stand here.
_READ_WRITE = (0, 1)
_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK

ECC_CORRECTED, ECC_UNCORRECTED = "ecc corrected, since boot", "ecc uncorrected, since boot"
# by name of the counter: endings of NVML's constants for the kind of error, and for the time that is counted
_COUNTERS: dict[str, tuple[str, str]] = {
    ECC_CORRECTED: ("CORRECTED", "VOLATILE"),
    ECC_UNCORRECTED: ("UNCORRECTED", "VOLATILE"),
    "ecc corrected, ever": ("CORRECTED", "AGGREGATE"),
    "ecc uncorrected, ever": ("UNCORRECTED", "AGGREGATE"),
}
_REMAPPED = ("rows remapped after corrected errors", "rows remapped after uncorrected errors")

# by name of the reading: NVML's function, the constant that it takes, and the divisor to the unit of the name
_CONDITION: dict[str, tuple[str, str | None, int]] = {
    "temperature_c": ("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU", 1),
    "power_w": ("nvmlDeviceGetPowerUsage", None, 1000),
    "power_limit_w": ("nvmlDeviceGetEnforcedPowerLimit", None, 1000),
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM", 1),
    "memory_clock_mhz": ("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM", 1),
    "fan_percent": ("nvmlDeviceGetFanSpeed", None, 1),
}

# nvml.h: nvmlClocksThrottleReason*
_THROTTLING = {
    0x01: "idle",
    0x02: "clocks set by an application",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal, by software",
    0x40: "thermal, by hardware",
    0x80: "power brake",
    0x100: "display clocks",
}

REMAP_PENDING, REMAP_FAILED = "row remapping pending", "row remapping failed"
REPLAYS = "pcie replays"


@contextmanager
def library() -> Iterator[ModuleType | None]:
    """Yield NVML, initialized, or None where there is none."""
    pynvml, _ = _start()
    if pynvml is None:
        yield None
        return
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def refusal() -> str | None:
    """Return why NVML does not answer: no library, no driver, or one of another version; None where it does."""
    pynvml, reason = _start()
    if pynvml is not None:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return reason


def _start() -> tuple[Any, str | None]:
    """Return NVML, initialized, or None and the reason why it cannot be."""
    try:
        import pynvml
    except ImportError as error:
        return None, str(error)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, str(error) or type(error).__name__
    return pynvml, None


def handle_of(nvml: Any, pci_bus_id: str) -> Any:
    """Return NVML's handle of the device at a PCI address; None where it knows no such device."""
    return _ask(nvml, "nvmlDeviceGetHandleByPciBusId", pci_bus_id)


def handle_of_uuid(nvml: Any, uuid: str) -> Any:
    """Return NVML's handle of the device with a UUID; None where it knows no such device."""
    full_uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"  # torch leaves the prefix out
    return _ask(nvml, "nvmlDeviceGetHandleByUUID", full_uuid)


def condition(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return temperatures, clocks, power and why the clocks are lowered, as far as the device reports them."""
    readings: dict[str, Any] = {}
    for name, (function, constant, divisor) in _CONDITION.items():
        arguments = () if constant is None else (getattr(nvml, constant, None),)
        value = _ask(nvml, function, handle, *arguments)
        if value is not None:
            readings[name] = value if divisor == 1 else value / divisor
    reasons = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if reasons is not None:
        readings["throttle_reasons"] = [text for bit, text in _THROTTLING.items() if int(reasons) & bit]
    return readings


def counters(nvml: Any, handle: Any) -> dict[str, int]:
    """Return every counter of errors that a GPU has; many have no ECC."""
    counts: dict[str, int] = {}
    for name, (kind, period) in _COUNTERS.items():
        error_type = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}", None)
        counter_type = getattr(nvml, f"NVML_{period}_ECC", None)
        value = _ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, error_type, counter_type)
        if value is not None:
            counts[name] = int(value)
    rows = _ask(nvml, "nvmlDeviceGetRemappedRows", handle)
    if rows is not None:
        counts.update(zip((*_REMAPPED, REMAP_PENDING, REMAP_FAILED), map(int, rows), strict=False))
    replays = _ask(nvml, "nvmlDeviceGetPcieReplayCounter", handle)
    if replays is not None:
        counts[REPLAYS] = int(replays)
    return counts


def nvlinks(nvml: Any, handle: Any) -> int | None:
    """Return how many of a GPU's NVLinks are up; None where it has none."""
    most_links = int(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))
    states = [_ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) for link in range(most_links)]
    is_up = [int(state) for state in states if state is not None]
    return sum(is_up) if is_up else None


def firmware(nvml: Any, handle: Any) -> str | None:
    """Return the version of a GPU's VBIOS; None where it is not reported."""
    return _ask_text(nvml, "nvmlDeviceGetVbiosVersion", handle)


def board(nvml: Any, handle: Any) -> str | None:
    """Return the part number of a GPU's board, which differs between boards with the same chip."""
    return _ask_text(nvml, "nvmlDeviceGetBoardPartNumber", handle)


def topology(nvml: Any, a: Any, b: Any) -> str | None:
    """Return how far apart two GPUs are, as `nvidia-smi topo -m` writes it."""
    level = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", a, b)
    return None if level is None else _TOPOLOGY.get(int(level), str(level))


def peer(nvml: Any, a: Any, b: Any) -> str | None:
    """Return what the driver reports of reading and writing from one GPU to another.

    It is one text where both are alike, else `read / write`; None where the driver reports neither.
    """
    statuses = [_ask(nvml, "nvmlDeviceGetP2PStatus", a, b, index) for index in _READ_WRITE]
    texts = [_PEER.get(int(status), str(status)) for status in statuses if status is not None]
    return " / ".join(dict.fromkeys(texts)) or None


def nvlink(nvml: Any, a: Any, b: Any) -> bool | None:
    """Return whether NVLink joins two GPUs, None where it is unknown."""
    status = _ask(nvml, "nvmlDeviceGetP2PStatus", a, b, _NVLINK)
    return None if status is None else int(status) == 0


def driver(nvml: Any) -> str | None:
    """Return the driver's version; None where it is not reported."""
    return _ask_text(nvml, "nvmlSystemGetDriverVersion")


def answer(nvml: Any, function: str, *arguments: Any) -> tuple[Any, str | None]:
    """Return the answer, or None and the reason why this library or this device has none.

    A GPU that shares the host's memory reports none of its own, a virtual machine may hide the PCI bus, and some
    answers need permissions.
    """
    try:
        return getattr(nvml, function)(*arguments), None
    except (nvml.NVMLError, ctypes.ArgumentError, AttributeError, TypeError, ValueError) as error:
        return None, str(error) or type(error).__name__


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """Return the answer; None where there is none."""
    return answer(nvml, function, *arguments)[0]


def _ask_text(nvml: Any, function: str, *arguments: Any) -> str | None:
    """Return the answer as text; None where there is none."""
    value = _ask(nvml, function, *arguments)
    return None if value is None else str(value)
