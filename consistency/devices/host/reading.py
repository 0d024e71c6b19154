"""Read the facts of this host, before a run and after it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from consistency.devices.cores import is_host_busy
from consistency.devices.host import amd, intel, pci, tools
from consistency.devices.host import nvml as management
from consistency.devices.host.facts import Gpu, HostFacts, Link
from consistency.devices.host.kernel_log import Run, read_log
from consistency.devices.spec import DeviceInfo
from consistency.devices.vendors import PLATFORMS, Vendor, vendor_of

HOST_BRIDGE = "host bridge"
"""The place above two devices that have no bridge in common."""

_OPTIONS = ("iommu", "intel_iommu", "amd_iommu", "iommu.passthrough", "iommu.strict")

# NVIDIA's GPUs are asked through the library NVML, in the same process.
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
    and `tool` the output of a vendor's command.
    """
    unread: dict[str, str] = {}
    log, reason = read_log(root, run)
    if reason is not None:
        unread["kernel log"] = reason
    for info in devices:
        unread |= {f"{info.spec.name}: {fact}": reason for fact, reason in info.not_reported.items()}
    gpus, links = _read_sysfs(devices, root, unread)
    if any(gpu.vendor is Vendor.NVIDIA for gpu in gpus):
        with library() as nvml:
            if nvml is None:
                unread["nvml"] = "NVIDIA's management library does not answer"
            else:
                gpus, links = _ask_nvml(nvml, gpus, links)
    gpus = _ask_tools(tool, gpus, unread)
    auto = next((info.auto for info in devices if info.auto is not None), None)
    # With `auto`, a card of the kind that torch is built for may be there and be no device.
    unused_cards = pci.cards(root, PLATFORMS[auto.build].pci_vendor) if auto is not None and auto.build else ()
    return HostFacts(
        host=platform.node(),
        kernel=platform.release(),
        boot_id=pci.read_text(root / "proc/sys/kernel/random/boot_id"),
        uptime_s=_uptime(root),
        iommu_options=_iommu_options(root),
        iommu=_units(root / "sys/class/iommu"),
        gpus=tuple(gpus),
        links=tuple(links),
        log=log,
        unread=unread,
        auto=auto,
        unused_cards=unused_cards,
        is_busy=is_host_busy(),
    )


def _read_sysfs(devices: Sequence[DeviceInfo], root: Path, unread: dict[str, str]) -> tuple[list[Gpu], list[Link]]:
    """Return the GPUs and how each two of them are connected, as sysfs shows them; `unread` is added to."""
    # Numerical variants of a device have its type and index, and are one device of the host.
    infos = {(info.spec.type, info.spec.index): info for info in devices if info.pci_bus_id is not None}
    gpus = [_read_gpu(root, info, unread) for info in infos.values()]
    links = []
    for i, a in enumerate(gpus):
        links += [_link(a, b) for b in gpus[i + 1 :] if a.pci_bus_id != b.pci_bus_id]
    return gpus, links


def _ask_tools(run: Run, gpus: list[Gpu], unread: dict[str, str]) -> list[Gpu]:
    """Return the GPUs with what the vendors' tools report; `unread` is added to."""
    for vendor, read in _TOOLS.items():
        if any(gpu.vendor is vendor for gpu in gpus):
            cards, reason = read(run)
            if reason is not None:
                unread[vendor] = reason
            gpus = [_with_card(gpu, cards, unread) if gpu.vendor is vendor else gpu for gpu in gpus]
    return gpus


def _uptime(root: Path) -> float | None:
    """Return the seconds since boot; None where the host does not report them."""
    fields = (pci.read_text(root / "proc/uptime") or "").split()
    return float(fields[0]) if fields and _is_number(fields[0]) else None


def _iommu_options(root: Path) -> tuple[str, ...]:
    """Return the options on the kernel's command line that concern the IOMMU, with their values."""
    options = (pci.read_text(root / "proc/cmdline") or "").split()
    return tuple(option for option in options if option.partition("=")[0] in _OPTIONS)


def since(before: HostFacts, after: HostFacts) -> HostFacts:
    """Return the facts before a run, with the counters that had risen and the new lines of the log when it ended."""
    gpus = [msgspec.structs.replace(gpu, after=_risen_counters(gpu, after.gpu(gpu.name))) for gpu in before.gpus]
    new_log: tuple[str, ...] = ()
    # Where the log was not readable before, all of its lines would look new.
    if "kernel log" not in before.unread:
        old_lines = set(before.log)
        new_log = tuple(line for line in after.log if line not in old_lines)
    return msgspec.structs.replace(before, gpus=tuple(gpus), new_log=new_log)


def _risen_counters(before: Gpu, after: Gpu | None) -> dict[str, int]:
    """Return the counters of a GPU that are higher than before; none where the GPU is not there any more.

    A counter that was not reported before is left out.
    """
    if after is None:
        return {}
    return {name: value for name, value in after.counters.items() if value > before.counters.get(name, value)}


def _read_gpu(root: Path, info: DeviceInfo, unread: dict[str, str]) -> Gpu:
    """Return a GPU as sysfs shows it; `unread` is added to."""
    assert info.pci_bus_id is not None
    address = pci.address(info.pci_bus_id)
    folder = root / "sys/bus/pci/devices"
    device = folder / address
    path = pci.path_of(device)
    if not path:
        unread["pci"] = "sysfs does not show the devices"
    group, group_type = pci.group_of(device)
    acs: dict[str, tuple[str, ...]] = {}
    for bridge in path[:-1]:
        try:
            controls = pci.acs_of(folder / bridge)
        except PermissionError:
            unread["acs"] = "not readable without root"
            continue
        if controls is not None:
            acs[bridge] = controls
    return Gpu(
        name=f"{info.spec.type}:{info.spec.index}",
        pci_bus_id=address,
        uuid=info.uuid,
        driver=info.driver,
        iommu_group=group,
        iommu_type=group_type,
        numa_node=pci.number_of(device, "numa_node"),
        path=path,
        acs=acs,
        link=pci.link_of(device, folder / path[-2] if len(path) > 1 else None),
        vendor=vendor_of(info.spec.type, info.capability),
    )


def _with_card(gpu: Gpu, cards: tools.Cards, unread: dict[str, str]) -> Gpu:
    """Return a GPU with the facts that the vendor's tool reports; the reasons for others are added to `unread`."""
    card = cards.get(gpu.pci_bus_id)
    if card is None:
        # without any card the tool did not answer, which is noted already
        if cards:
            unread[f"{gpu.name}: {gpu.vendor}"] = "its tool does not list the device"
        return gpu
    unread |= {f"{gpu.name}: {fact}": reason for fact, reason in card.unread.items()}
    return msgspec.structs.replace(
        gpu, driver=card.driver or gpu.driver, vbios=card.vbios, board=card.board, counters=dict(card.counters)
    )


def _link(a: Gpu, b: Gpu) -> Link:
    """Return two GPUs with the last bridge above both; the ancestor is None where sysfs does not show one of them."""
    ancestor = None
    if a.path and b.path:
        shared_bridges = [one for one, other in zip(a.path, b.path, strict=False) if one == other]
        ancestor = shared_bridges[-1] if shared_bridges else HOST_BRIDGE
    return Link(a=a.name, b=b.name, ancestor=ancestor)


def _ask_nvml(nvml: Any, gpus: Sequence[Gpu], links: Sequence[Link]) -> tuple[list[Gpu], list[Link]]:
    """Return GPUs and links with the facts of NVIDIA's management library; unknown ones stay the same."""
    handles = {gpu.name: management.handle_of(nvml, gpu.pci_bus_id) for gpu in gpus}
    version = management.driver(nvml)
    asked_gpus = []
    for gpu in gpus:
        handle = handles[gpu.name]
        if handle is not None:
            gpu = msgspec.structs.replace(
                gpu,
                driver=version or gpu.driver,
                counters=management.counters(nvml, handle),
                nvlinks=management.nvlinks(nvml, handle),
                vbios=management.firmware(nvml, handle),
                board=management.board(nvml, handle),
            )
        asked_gpus.append(gpu)
    asked_links = []
    for link in links:
        a, b = handles[link.a], handles[link.b]
        if a is not None and b is not None:
            link = msgspec.structs.replace(
                link,
                topology=management.topology(nvml, a, b),
                peer=management.peer(nvml, a, b),
                nvlink=management.nvlink(nvml, a, b),
            )
        asked_links.append(link)
    return asked_gpus, asked_links


def _units(folder: Path) -> str | None:
    """Return the names of the IOMMU's units, `none` where the kernel drives none; None where that is not readable."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return None
    return ", ".join(names) or "none"


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
