"""The facts of a host, as values."""

from __future__ import annotations

import msgspec

from consistency.devices.spec import AutoChoice
from consistency.devices.vendors import Vendor

TRANSLATING: frozenset[str] = frozenset({"DMA", "DMA-FQ"})
"""Types of an IOMMU group under which a device's addresses are translated (Linux, `sysfs-kernel-iommu_groups`).

Under the type `identity` they are not, which is what `iommu=pt` asks for."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One accelerator as the host sees it.

    Attributes
    ----------
    name : str
        Name of the device for users: `cuda:1`.
    pci_bus_id : str
        PCI bus id as sysfs writes it: `0000:17:00.0`.
    iommu_group, iommu_type : str or None
        Number and type of the device's IOMMU group; the types `DMA` and `DMA-FQ` translate addresses, `identity` does
        not.
    path : tuple of str
        PCI bus ids from the root down to the device itself.
    acs : dict
        Names of the ACS controls that are on, by the PCI bus id of each bridge above the device that has ACS.
    link : dict of str to int or str
        The PCIe link: `width`, `max_width`, `slot_width`, `speed`, `max_speed`. A link that idles runs below its
        greatest speed, and not every slot is as wide as the device.
    counters, after : dict of str to int
        Counters of ECC, row remapping and PCIe replays when the run began, and those that had risen when it ended.
    nvlinks : int or None
        Number of NVLink links that are up.
    vbios, board : str or None
        Version of the firmware, and part number of the board.
    vendor : Vendor
        Vendor of the device, whose tool or library was asked.
    """

    name: str
    pci_bus_id: str
    uuid: str | None = None
    driver: str | None = None
    iommu_group: str | None = None
    iommu_type: str | None = None
    numa_node: int | None = None
    path: tuple[str, ...] = ()
    acs: dict[str, tuple[str, ...]] = {}
    link: dict[str, int | str] = {}
    counters: dict[str, int] = {}
    after: dict[str, int] = {}
    nvlinks: int | None = None
    vbios: str | None = None
    board: str | None = None
    vendor: Vendor = Vendor.OTHER

    @property
    def lanes_lost(self) -> tuple[int, int] | None:
        """Return how many lanes the link has and how many device and slot support; None where none is missing."""
        width = self.link.get("width")
        supported = [self.link.get(key) for key in ("max_width", "slot_width")]
        known = [lanes for lanes in supported if isinstance(lanes, int)]
        if not isinstance(width, int) or not known or not 0 < width < min(known):
            return None
        return width, min(known)

    @property
    def is_translated(self) -> bool:
        """Return whether the IOMMU translates the device's addresses."""
        return self.iommu_type in TRANSLATING


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The connection between two accelerators.

    Attributes
    ----------
    a, b : str
        Names of the two accelerators.
    ancestor : str or None
        PCI bus id of the last bridge above both; `host bridge` where they have only the root complex in common.
    topology : str or None
        NVML's name for the connection, as `nvidia-smi topo -m` writes it: PIX, PXB, PHB, NODE, SYS.
    peer : str or None
        The driver's answer whether each can read and write the other's memory: `ok`, or why not.
    nvlink : bool or None
        Whether NVLink joins the two, as NVML reports.
    """

    a: str
    b: str
    ancestor: str | None = None
    topology: str | None = None
    peer: str | None = None
    nvlink: bool | None = None

    @property
    def kind(self) -> str | None:
        """Return the kind of connection, which decides how fast copies are; None where it is unknown."""
        return "NVLink" if self.nvlink else self.topology


class HostFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One host during one run.

    Attributes
    ----------
    boot_id : str or None
        Changes with each boot: a reboot can hide such faults, so two boots have to be distinguished.
    iommu_options : tuple of str
        Options on the kernel's command line that concern the IOMMU.
    iommu : str or None
        `none` where the kernel drives none, else the names of its units.
    log, new_log : tuple of str
        Lines of the kernel with Xid, IO_PAGE_FAULT or an error of the PCI bus: since boot, and those of the run itself.
    unread : dict
        Why a fact is not here.
    auto : AutoChoice or None
        What `auto` found; None where the devices of the run were named.
    unused_cards : tuple of str
        PCI addresses, with the driver, of cards of the kind that torch is built for, where none of them is a device.
    is_busy : bool
        Processes computed on more than half of the cores when the run began.
    """

    host: str
    kernel: str = ""
    boot_id: str | None = None
    uptime_s: float | None = None
    iommu_options: tuple[str, ...] = ()
    iommu: str | None = None
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    log: tuple[str, ...] = ()
    new_log: tuple[str, ...] = ()
    unread: dict[str, str] = {}
    auto: AutoChoice | None = None
    unused_cards: tuple[str, ...] = ()
    is_busy: bool = False

    def gpu(self, name: str) -> Gpu | None:
        """Return the accelerator of a name; None where there is none."""
        return next((gpu for gpu in self.gpus if gpu.name == name), None)
