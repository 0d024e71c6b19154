"""A machine made of files: four GPUs below two switches, as sysfs and procfs show one."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from consistency.devices.spec import DeviceInfo, DeviceSpec

BOOT = "11111111-2222-3333-4444-555555555555"
PORTS = {"0000:16:01.0": ("0000:17:00.0", "0000:18:00.0"), "0000:96:01.0": ("0000:97:00.0", "0000:98:00.0")}
ADDRESSES = [address for below in PORTS.values() for address in below]


def config_space(*, acs: int | None) -> bytes:
    """Return a configuration of 4 KiB whose second extended capability is ACS, with these controls on."""
    raw = bytearray(4096)
    struct.pack_into("<I", raw, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)  # advanced error reporting comes first
    if acs is not None:
        struct.pack_into("<I", raw, 0x148, 0x000D | 1 << 16)
        struct.pack_into("<HH", raw, 0x148 + 4, 0x7F, acs)
    return bytes(raw)


def make_host(
    root: Path, *, iommu: str = "DMA-FQ", acs: int | None = 0, root_user: bool = True, log: str = "", width: int = 16
) -> Path:
    """Write the files of a machine."""
    for number, (port, below) in enumerate(PORTS.items()):
        bus = root / "sys/devices" / f"pci{port[:7]}" / port
        for address in below:
            device = bus / address
            device.mkdir(parents=True)
            group = root / "sys/kernel/iommu_groups" / address[5:7]
            group.mkdir(parents=True)
            (group / "type").write_text(f"{iommu}\n")
            (device / "iommu_group").symlink_to(group)
            (device / "numa_node").write_text(f"{number}\n")
            for name, text in (("current", width), ("max", 16)):
                (device / f"{name}_link_width").write_text(f"{text}\n")
                (device / f"{name}_link_speed").write_text("16.0 GT/s PCIe\n")
            _publish(root, device)
        (bus / "config").write_bytes(config_space(acs=acs) if root_user else config_space(acs=acs)[:64])
        (bus / "max_link_width").write_text("16\n")
        _publish(root, bus)
    _write(root / "proc/cmdline", "BOOT_IMAGE=/vmlinuz ro amd_iommu=on iommu.strict=0 quiet\n")
    _write(root / "proc/uptime", "7200.50 100.0\n")
    _write(root / "proc/sys/kernel/random/boot_id", f"{BOOT}\n")
    (root / "sys/class/iommu/ivhd0").mkdir(parents=True)
    if log:
        _write(root / "dev/kmsg", log)
    return root


def _publish(root: Path, device: Path) -> None:
    home = root / "sys/bus/pci/devices"
    home.mkdir(parents=True, exist_ok=True)
    (home / device.name).symlink_to(device)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def gpus(count: int = 4) -> list[DeviceInfo]:
    """Return the devices as NVML names them: eight digits for the domain, upper case."""
    return [
        DeviceInfo(
            spec=DeviceSpec(type="cuda", index=i), architecture="Ampere sm_86", model="RTX A6000", uuid=f"GPU-{i}",
            pci_bus_id=f"0000{ADDRESSES[i].upper()}", driver="535.1",
        )
        for i in range(count)
    ]  # fmt: skip


class NVMLError(Exception):
    """As the library's."""


def make_nvml(*, uncorrected: int = 0, remapped: tuple[int, int, int, int] | None = None) -> Any:
    """Return as much of NVML as is asked for: GPUs without NVLink, two of which cannot reach each other."""

    def handle(address: str) -> str:
        if address not in ADDRESSES:
            raise NVMLError("not found")
        return address

    def refuse(*_: Any) -> Any:
        raise NVMLError("not supported")

    def errors(_handle: str, kind: int, since: int) -> int:
        return uncorrected if (kind, since) == (1, 0) else 0

    def peer(a: str, b: str, index: int) -> int:
        if not isinstance(index, int):
            raise TypeError(index)
        return 5 if index == 2 else 0 if a[:6] == b[:6] else 3

    return SimpleNamespace(
        NVMLError=NVMLError, NVML_NVLINK_MAX_LINKS=4, NVML_MEMORY_ERROR_TYPE_CORRECTED=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1, NVML_VOLATILE_ECC=0, NVML_AGGREGATE_ECC=1,
        nvmlDeviceGetHandleByPciBusId=handle, nvmlDeviceGetTotalEccErrors=errors,
        nvmlDeviceGetRemappedRows=refuse if remapped is None else lambda _: remapped,
        nvmlDeviceGetPcieReplayCounter=lambda _: 7, nvmlDeviceGetNvLinkState=refuse,
        nvmlDeviceGetTopologyCommonAncestor=lambda a, b: 10 if a[5] == b[5] else 50,
        nvmlDeviceGetP2PStatus=peer, nvmlSystemGetDriverVersion=lambda: "535.2",
        nvmlDeviceGetVbiosVersion=lambda _: "94.02.5C.00.0D",
        nvmlDeviceGetBoardPartNumber=lambda address: f"900-{ADDRESSES.index(address)}",
    )  # fmt: skip
