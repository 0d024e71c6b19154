"""Describe devices of NVIDIA, AMD and Intel, as torch reports them, in the terms of their vendors. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Vendor(StrEnum):
    """Who made a device, as far as the tools of the vendors matter."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"
    INTEL = "Intel"
    OTHER = "other"


_TESTED_BY = {Vendor.NVIDIA: "dcgmi diag -r 3", Vendor.AMD: "rvs", Vendor.INTEL: "xpu-smi diag -l 3"}


def own_test(vendor: Vendor) -> str:
    """Return the vendor's own test: NVIDIA's DCGM, AMD's ROCm Validation Suite, Intel's XPU Manager."""
    return _TESTED_BY.get(vendor, "its vendor's own tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The hardware that a build of torch computes on."""

    name: str
    """The platform's usual name."""
    pci_vendor: int
    """PCI id of the vendor of its cards, as sysfs has it."""
    hidden_by: str | None = None
    """Assignment to an environment variable that hides all of its devices from a process."""


PLATFORMS: Mapping[str, Platform] = {
    "cuda": Platform(name="CUDA", pci_vendor=0x10DE, hidden_by="CUDA_VISIBLE_DEVICES="),
    "hip": Platform(name="ROCm", pci_vendor=0x1002, hidden_by="HIP_VISIBLE_DEVICES=-1"),
    "xpu": Platform(name="XPU", pci_vendor=0x8086),
}
"""Platforms by the name in torch's `version.py`. Vendors: PCI ID Repository, https://pci-ids.ucw.cz."""

# By the start of the processor's name: LLVM, "User Guide for AMDGPU Backend", Processors; family names as in AMD's
# "GPU hardware specifications".
_AMD = {
    "gfx900": "GCN 5.0",
    "gfx906": "GCN 5.1",
    "gfx908": "CDNA",
    "gfx90a": "CDNA 2",
    "gfx94": "CDNA 3",
    "gfx950": "CDNA 4",
    "gfx101": "RDNA",
    "gfx103": "RDNA 2",
    "gfx110": "RDNA 3",
    "gfx115": "RDNA 3.5",
    "gfx120": "RDNA 4",
}

# Linux, drivers/gpu/drm/xe/xe_pci.c, by major and minor version; 12.56 and 12.57 are smaller chips of 12.55's family
_INTEL = {
    (12, 0): "Xe-LP", (12, 10): "Xe-LP", (12, 55): "Xe-HPG", (12, 56): "Xe-HPG", (12, 57): "Xe-HPG",
    (12, 60): "Xe-HPC", (12, 61): "Xe-HPC", (12, 70): "Xe-LPG", (12, 71): "Xe-LPG", (12, 74): "Xe-LPG",
    (20, 1): "Xe2-HPG", (20, 2): "Xe2-HPG", (20, 4): "Xe2-LPG", (30, 0): "Xe3-LPG", (30, 1): "Xe3-LPG",
}  # fmt: skip


# NVIDIA's architecture names by compute capability: CUDA C++ programming guide, "Compute Capabilities".
_NVIDIA = {
    (5, 0): "Maxwell", (5, 2): "Maxwell", (5, 3): "Maxwell",
    (6, 0): "Pascal", (6, 1): "Pascal", (6, 2): "Pascal",
    (7, 0): "Volta", (7, 2): "Volta", (7, 5): "Turing",
    (8, 0): "Ampere", (8, 6): "Ampere", (8, 7): "Ampere", (8, 9): "Ada Lovelace",
    (9, 0): "Hopper",
    (10, 0): "Blackwell", (10, 3): "Blackwell", (11, 0): "Blackwell", (12, 0): "Blackwell", (12, 1): "Blackwell",
}  # fmt: skip


SHARES_MEMORY = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0), (12, 1)})
"""Capabilities of chips whose GPU has no memory of its own: Jetson (TX1 to Thor, which was 10.1 before CUDA 13) and
GB10. https://developer.nvidia.com/cuda-gpus"""


def nvidia_architecture(capability: tuple[int, int]) -> str:
    """Name an NVIDIA architecture: `(8, 6)` gives `Ampere sm_86`."""
    major, minor = capability
    return f"{_NVIDIA.get((major, minor), 'NVIDIA')} sm_{major}{minor}"


def amd_architecture(gcn: str) -> str:
    """Name an AMD architecture: `gfx942:sramecc+:xnack-` gives `CDNA 3 gfx942`."""
    name = gcn.partition(":")[0]
    family = next((family for prefix, family in _AMD.items() if name.startswith(prefix)), Vendor.AMD)
    return f"{family} {name}"


def intel_version(architecture: int) -> str | None:
    """Return the version of Intel's graphics IP, `12.60.7`, from the number of a device's architecture in SYCL.

    Bits 8 and up are the register GMD_ID of Intel's GPUs: 10 bits of the major version, 8 of the minor one, 8 reserved,
    6 of the revision. SYCL numbers other vendors, and what it does not know, from 2**56 on: they give None.
    """
    if not 0 < architecture < 1 << 56:
        return None
    version = architecture >> 8
    return f"{version >> 22}.{version >> 14 & 0xFF}.{version & 0x3F}"


def intel_architecture(version: str) -> str:
    """Name an Intel architecture: `12.60.7` gives `Xe-HPC 12.60.7`."""
    major, minor, _ = (int(part) for part in version.split("."))
    return f"{_INTEL.get((major, minor), Vendor.INTEL)} {version}"


def amd_uuid(raw: Sequence[int]) -> str | None:
    """Return the UUID as ROCm's tools and variables write it: `GPU-` and 16 digits; None where it has another form.

    HIP has these digits as text in its 16 bytes.
    """
    text = bytes(raw).decode("ascii", errors="replace").rstrip("\0").lower()
    return f"GPU-{text}" if re.fullmatch(r"[0-9a-f]{16}", text) else None


def intel_pci_bus_id(raw: Sequence[int]) -> str | None:
    """Return the PCI bus id that the UUID of an Intel GPU contains; None where it has another form.

    Vendor, device, revision and domain in two bytes each, little-endian, then bus, device and function
    (`Device::generateUuidFromPciBusInfo` of Intel's compute-runtime).
    """
    data = bytes(raw)
    if len(data) != 16 or int.from_bytes(data[:2], "little") != PLATFORMS["xpu"].pci_vendor:
        return None
    return f"{int.from_bytes(data[6:8], 'little'):04x}:{data[8]:02x}:{data[9]:02x}.{data[10]:x}"


def vendor_of(kind: str, capability: str | None) -> Vendor:
    """Return who made a device, by its type in torch and its capability; AMD's devices are `cuda` there too."""
    if kind == "xpu":
        return Vendor.INTEL
    if kind != "cuda":
        return Vendor.OTHER
    return Vendor.AMD if (capability or "").startswith("gfx") else Vendor.NVIDIA


def described(kind: str, properties: Any) -> dict[str, Any]:
    """Return the fields of `DeviceInfo` that torch's properties of a device state; `not_reported` has the others.

    Parameters
    ----------
    kind : str
        Type of the device in torch; AMD's is `cuda`.
    properties : object
        The result of `get_device_properties`; None where the backend has no such function.
    """
    gcn = getattr(properties, "gcnArchName", "") or ""
    if kind == "cuda" and gcn.startswith("gfx"):
        fields = _amd(properties, gcn)
    elif kind == "cuda" and isinstance(getattr(properties, "major", None), int):
        fields = _nvidia(properties)
    elif kind == "xpu":
        fields = _intel(properties)
    else:
        return _any(kind, properties) | _sharing(properties)
    fields["memory_bytes"] = getattr(properties, "total_memory", None)
    nouns = {"uuid": "UUID", "pci_bus_id": "PCI bus id", "memory_bytes": "memory", "capability": "architecture"}
    missing = {noun: "not among the properties of the device" for key, noun in nouns.items() if not fields.get(key)}
    return {**fields, **_sharing(properties), "not_reported": missing, "asked": "torch"}


def _sharing(properties: Any) -> dict[str, bool]:
    """Return the field `shares_memory` of a device whose memory is the host's; nothing for other devices."""
    return {"shares_memory": True} if getattr(properties, "is_integrated", False) else {}


def _pci_bus_id(properties: Any) -> str | None:
    """Return a PCI bus id from its three numbers; None where one of them is not reported."""
    domain, bus, device = (getattr(properties, f"pci_{number}_id", None) for number in ("domain", "bus", "device"))
    if not (isinstance(domain, int) and isinstance(bus, int) and isinstance(device, int)):
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _nvidia(properties: Any) -> dict[str, Any]:
    """Describe a device of NVIDIA."""
    capability = (int(properties.major), int(properties.minor))
    model = str(getattr(properties, "name", "") or Vendor.NVIDIA)
    uuid = str(getattr(properties, "uuid", "") or "")
    # of an instance of MIG torch may report the UUID of the whole card, which its other instances have too
    identifies = bool(uuid) and " MIG " not in model
    return {
        "architecture": nvidia_architecture(capability),
        "model": model,
        "capability": f"{capability[0]}.{capability[1]}",
        "uuid": f"GPU-{uuid.removeprefix('GPU-')}" if identifies else None,
        "pci_bus_id": _pci_bus_id(properties),
    }


def _amd(properties: Any, gcn: str) -> dict[str, Any]:
    """Describe a device of AMD; `gcn` is its architecture: `gfx942:sramecc+:xnack-`."""
    raw = _bytes(getattr(properties, "uuid", None))
    return {
        "architecture": amd_architecture(gcn),
        "model": getattr(properties, "name", "") or amd_architecture(gcn),  # some drivers report an empty name
        "capability": gcn,
        "uuid": None if raw is None else amd_uuid(raw) or str(properties.uuid),
        "pci_bus_id": _pci_bus_id(properties),
    }


def _intel(properties: Any) -> dict[str, Any]:
    """Describe a device of Intel."""
    raw = _bytes(getattr(properties, "uuid", None))
    number = getattr(properties, "architecture", None)
    version = intel_version(number) if isinstance(number, int) else None
    model = str(getattr(properties, "name", "") or Vendor.INTEL)
    return {
        "architecture": f"xpu {model}" if version is None else intel_architecture(version),
        "model": model,
        "capability": version,
        "uuid": None if raw is None else str(properties.uuid),
        "pci_bus_id": None if raw is None else intel_pci_bus_id(raw),
        "driver": getattr(properties, "driver_version", None),
    }


def _any(kind: str, properties: Any) -> dict[str, Any]:
    """Describe a device of another vendor by the usual properties, as far as it has them."""
    model = str(getattr(properties, "name", kind))
    uuid = getattr(properties, "uuid", None)
    architecture = getattr(properties, "gcnArchName", None) or getattr(properties, "architecture", None)
    return {
        "architecture": f"{kind} {architecture or model}",
        "model": model,
        "uuid": None if uuid is None else str(uuid),
        "memory_bytes": getattr(properties, "total_memory", None),
    }


def _bytes(uuid: Any) -> bytes | None:
    """Return the 16 bytes of a UUID of torch, which has them as `bytes` or only as text."""
    raw = getattr(uuid, "bytes", None)
    if raw is not None:
        return bytes(raw)
    digits = re.sub(r"-", "", str(uuid))
    return bytes.fromhex(digits) if re.fullmatch(r"[0-9a-fA-F]{32}", digits) else None
