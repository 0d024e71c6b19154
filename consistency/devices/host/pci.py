"""Read what sysfs reports of a PCI device: the bridges above it, its IOMMU group, its link, and their ACS."""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from pathlib import Path

_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")

# PCI Code and ID Assignment Specification, 1.4 and 1.19: data center cards of AMD are processing accelerators
_DISPLAY, _ACCELERATOR = 0x03, 0x12

_GIVEN_AWAY = "vfio-pci"  # the driver of a card that a virtual machine has

_EXTENDED = 0x100  # where the extended capabilities begin (PCI Express Base Specification, 7.6.1)
_ACS = 0x000D  # the ID of Access Control Services there (7.7.11); its control register is 6 bytes further on
# the names of the bits of the control register, from the lowest
_CONTROLS = (
    "source validation",
    "translation blocking",
    "request redirect",
    "completion redirect",
    "upstream forwarding",
    "egress control",
    "direct translated",
)

REDIRECTS: frozenset[str] = frozenset({"request redirect", "completion redirect"})
"""ACS controls that send what one device writes to another up to the root complex, and so through the IOMMU."""


def address(pci_bus_id: str) -> str:
    """Return a PCI bus id as sysfs writes it: NVML's has eight digits for the domain, `00000000:17:00.0`."""
    domain, _, bus_and_device = pci_bus_id.lower().partition(":")
    return f"{domain[-4:]}:{bus_and_device}"


def path_of(device: Path) -> tuple[str, ...]:
    """Return the PCI addresses from the root down to a device, by its folder in sysfs; empty where it has none."""
    try:
        parts = device.resolve(strict=True).parts
    except OSError:
        return ()
    return tuple(part for part in parts if _ADDRESS.match(part))


def read_text(path: Path) -> str | None:
    """Return a file's text without blanks around it; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def cards(root: Path, vendor: int) -> tuple[str, ...]:
    """Return the addresses of a vendor's graphics cards and accelerators, each with its driver.

    `vendor` is the PCI id of the vendor. A card that a virtual machine has is left out.
    """
    descriptions = []
    with suppress(OSError):  # no PCI bus
        for device in sorted((root / "sys/bus/pci/devices").iterdir()):
            # the class code has three bytes; the first one is the kind of device
            kind = _hexadecimal(device / "class") >> 16
            has_vendor = _hexadecimal(device / "vendor") == vendor
            driver = (device / "driver").resolve().name if (device / "driver").exists() else None
            if has_vendor and kind in (_DISPLAY, _ACCELERATOR) and driver != _GIVEN_AWAY:
                driver_text = "no driver" if driver is None else f"driver {driver}"
                descriptions.append(f"{device.name} ({driver_text})")
    return tuple(descriptions)


def _hexadecimal(path: Path) -> int:
    """Return the number in a file, such as `0x10de`; 0 where there is none."""
    text = read_text(path) or ""
    return int(text, 16) if re.fullmatch(r"0x[0-9a-f]+", text) else 0


def group_of(device: Path) -> tuple[str | None, str | None]:
    """Return number and type of a device's IOMMU group; both None where it has none."""
    try:
        group = (device / "iommu_group").resolve(strict=True)
    except OSError:
        return None, None
    return group.name, read_text(group / "type")


def link_of(device: Path, port: Path | None) -> dict[str, int | str]:
    """Return width and speed of a device's link, the greatest that it supports, and the width of its slot.

    `port` is the bridge above the device, None where it is not known. What sysfs does not state is left out.
    """
    link: dict[str, int | str] = {}
    for name in ("width", "speed"):
        for prefix, key in (("current", name), ("max", f"max_{name}")):
            text = read_text(device / f"{prefix}_link_{name}")
            if text is not None and not text.startswith("Unknown"):
                link[key] = int(text) if text.isdigit() else text
    slot_width = None if port is None else number_of(port, "max_link_width")
    if slot_width is not None:
        link["slot_width"] = slot_width
    return link


def number_of(device: Path, name: str) -> int | None:
    """Return a number that sysfs holds; None where it holds none, as the NUMA node -1."""
    text = read_text(device / name)
    return int(text) if text is not None and text.isdigit() else None


def acs_of(bridge: Path) -> tuple[str, ...] | None:
    """Return the ACS controls of a bridge that are on; None where it has no ACS.

    Raises
    ------
    PermissionError
        Without root only the first 64 bytes of the configuration can be read, which do not include ACS.
    """
    try:
        raw = (bridge / "config").read_bytes()
    except OSError:
        raise PermissionError from None
    if len(raw) <= 64:
        raise PermissionError
    # The capabilities are a linked list: a header has the ID in its low 16 bits, and the offset of the next one in its
    # high 12 bits, 0 at the end. A damaged list must not be followed in circles.
    offset, visited = _EXTENDED, set()
    while offset >= _EXTENDED and offset + 8 <= len(raw) and offset not in visited:
        visited.add(offset)
        (header,) = struct.unpack_from("<I", raw, offset)
        if header & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", raw, offset + 6)
            return tuple(name for bit, name in enumerate(_CONTROLS) if control >> bit & 1)
        offset = header >> 20
    return None
