"""Read the facts of this host, before a run and after it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from consistency.devices.host import amd, intel, pci, tools
from consistency.devices.host import nvml as management
from consistency.devices.host.facts import Gpu, HostFacts, Link
from consistency.devices.host.kernel_log import Run, read_log
from consistency.devices.spec import DeviceInfo
from consistency.devices.vendors import PLATFORMS, Vendor, vendor_of

HOST_BRIDGE = "host bridge"
_OPTIONS = ("iommu", "intel_iommu", "amd_iommu", "iommu.passthrough", "iommu.strict")

_TOOLS = {Vendor.AMD: amd.read, Vendor.INTEL: intel.read}

Library = Callable[[], AbstractContextManager[Any]]


def read_host(
    devices: Sequence[DeviceInfo],
    *,
    root: Path = Path("/"),
    library: Library = management.library,
    run: Run | None = None,
    tool: Run = tools.run,
) -> HostFacts:
    """Read what can be read of this host; nothing is raised, and no device itself is queried.

    A device without a PCI bus id is left out. `root` holds `sys`, `proc` and `dev`; `run` returns a command's output,
    and `tool` that of a vendor's.
    """
    unread: dict[str, str] = {}
    log, why = read_log(root, run)
    if why is not None:
        unread["kernel log"] = why
    unread |= {f"{info.spec.name}: {what}": why for info in devices for what, why in info.not_reported.items()}
    known = {
        info.spec.index: (f"{info.spec.type}:{info.spec.index}", pci.address(info.pci_bus_id), info)
        for info in devices
        if info.pci_bus_id is not None
    }
    gpus = [_gpu(root, name, address, info, unread) for name, address, info in known.values()]
    links = [_link(a, b) for i, a in enumerate(gpus) for b in gpus[i + 1 :] if a.pci_bus_id != b.pci_bus_id]
    if any(gpu.vendor is Vendor.NVIDIA for gpu in gpus):
        with library() as nvml:
            if nvml is None:
                unread["nvml"] = "NVIDIA's management library does not answer"
            else:
                gpus, links = _ask_nvml(nvml, gpus, links)
    for vendor, read in _TOOLS.items():
        if any(gpu.vendor is vendor for gpu in gpus):
            cards, why = read(tool)
            if why is not None:
                unread[vendor] = why
            gpus = [_with_card(gpu, cards, unread) if gpu.vendor is vendor else gpu for gpu in gpus]
    auto = next((info.auto for info in devices if info.auto is not None), None)
    unused = pci.cards(root, PLATFORMS[auto.build].pci_vendor) if auto is not None and auto.build else ()
    options = (pci.read_text(root / "proc/cmdline") or "").split()
    uptime = (pci.read_text(root / "proc/uptime") or "").split()
    return HostFacts(
        host=platform.node(),
        kernel=platform.release(),
        boot_id=pci.read_text(root / "proc/sys/kernel/random/boot_id"),
        uptime_s=float(uptime[0]) if uptime and _is_number(uptime[0]) else None,
        iommu_options=tuple(text for text in options if text.partition("=")[0] in _OPTIONS),
        iommu=_units(root / "sys/class/iommu"),
        gpus=tuple(gpus),
        links=tuple(links),
        log=log,
        unread=unread,
        auto=auto,
        unused_cards=unused,
    )


def since(before: HostFacts, after: HostFacts) -> HostFacts:
    """Return the facts before a run, with what had changed when it ended."""
    gpus = []
    for gpu in before.gpus:
        then = after.gpu(gpu.name)
        risen = {
            name: value
            for name, value in ({} if then is None else then.counters).items()
            if value > gpu.counters.get(name, value)
        }
        gpus.append(msgspec.structs.replace(gpu, after=risen))
    old = set(before.log)
    new = () if "kernel log" in before.unread else tuple(line for line in after.log if line not in old)
    return msgspec.structs.replace(before, gpus=tuple(gpus), new_log=new)


def _gpu(root: Path, name: str, address: str, info: DeviceInfo, unread: dict[str, str]) -> Gpu:
    home = root / "sys/bus/pci/devices"
    device = home / address
    path = pci.path_of(device)
    if not path:
        unread["pci"] = "sysfs does not show the devices"
    group, kind = pci.group_of(device)
    acs: dict[str, tuple[str, ...]] = {}
    for bridge in path[:-1]:
        try:
            controls = pci.acs_of(home / bridge)
        except PermissionError:
            unread["acs"] = "not readable without root"
            continue
        if controls is not None:
            acs[bridge] = controls
    return Gpu(
        name=name,
        pci_bus_id=address,
        uuid=info.uuid,
        driver=info.driver,
        iommu_group=group,
        iommu_type=kind,
        numa_node=pci.number_of(device, "numa_node"),
        path=path,
        acs=acs,
        link=pci.link_of(device, home / path[-2] if len(path) > 1 else None),
        vendor=vendor_of(info.spec.type, info.capability),
    )


def _with_card(gpu: Gpu, cards: tools.Cards, unread: dict[str, str]) -> Gpu:
    """Add what the vendor's tool reports of a GPU, and note what it does not."""
    card = cards.get(gpu.pci_bus_id)
    if card is None:
        if cards:
            unread[f"{gpu.name}: {gpu.vendor}"] = "its tool does not list the device"
        return gpu
    unread |= {f"{gpu.name}: {what}": why for what, why in card.unread.items()}
    return msgspec.structs.replace(
        gpu, driver=card.driver or gpu.driver, vbios=card.vbios, board=card.board, counters=dict(card.counters)
    )


def _link(a: Gpu, b: Gpu) -> Link:
    shared = [x for x, y in zip(a.path, b.path, strict=False) if x == y]
    ancestor = (shared[-1] if shared else HOST_BRIDGE) if a.path and b.path else None
    return Link(a=a.name, b=b.name, ancestor=ancestor)


def _ask_nvml(nvml: Any, gpus: Sequence[Gpu], links: Sequence[Link]) -> tuple[list[Gpu], list[Link]]:
    handles = {gpu.name: management.handle_of(nvml, gpu.pci_bus_id) for gpu in gpus}
    version = management.driver(nvml)
    told = [
        gpu
        if handles[gpu.name] is None
        else msgspec.structs.replace(
            gpu,
            driver=version or gpu.driver,
            counters=management.counters(nvml, handles[gpu.name]),
            nvlinks=management.nvlinks(nvml, handles[gpu.name]),
            vbios=management.firmware(nvml, handles[gpu.name]),
            board=management.board(nvml, handles[gpu.name]),
        )
        for gpu in gpus
    ]
    joined = [
        link
        if None in (handles[link.a], handles[link.b])
        else msgspec.structs.replace(
            link,
            topology=management.topology(nvml, handles[link.a], handles[link.b]),
            peer=management.peer(nvml, handles[link.a], handles[link.b]),
            nvlink=management.nvlink(nvml, handles[link.a], handles[link.b]),
        )
        for link in links
    ]
    return told, joined


def _units(folder: Path) -> str | None:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return None
    return ", ".join(names) or "none"


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
