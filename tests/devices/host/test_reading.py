"""What is read of a machine, from files and a library made for it; and that nothing of it ever fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from consistency.capture.json_codec import decode_json, encode_json
from consistency.comparison.findings.host import host_problems
from consistency.devices.host import HostFacts, nvml, read_host, since
from consistency.devices.host.kernel_log import read_log
from consistency.devices.spec import AutoChoice, DeviceInfo, DeviceSpec
from tests.devices.host.made_host import BOOT, gpus, make_host, make_nvml

RR_CR = 0b1100  # request and completion redirect
LOG = (
    "6,1,1000,-;AER: enabled with IRQ 30\n"
    "4,339,5140900,-;NVRM: Xid (PCI:0000:17:00): 31, pid=1, MMU Fault\n"
    "6,340,5140901,-;AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0012 address=0xff]\n"
    "6,341,5140902,-;eth0: link up\n"
)


def read(root: Path, library: Any = None, **of: Any) -> HostFacts:
    @contextmanager
    def give() -> Iterator[Any]:
        yield library

    return read_host(gpus(), root=root, library=give, run=of.get("run", lambda _: None))


def test_a_machine_is_read(tmp_path: Path) -> None:
    host_facts = read(make_host(tmp_path, acs=RR_CR, log=LOG), make_nvml())
    assert (host_facts.boot_id, host_facts.uptime_s, host_facts.iommu) == (BOOT, 7200.5, "ivhd0")
    assert host_facts.iommu_options == ("amd_iommu=on", "iommu.strict=0")
    first = host_facts.gpus[0]
    assert (first.name, first.pci_bus_id, first.uuid, first.driver) == ("cuda:0", "0000:17:00.0", "GPU-0", "535.2")
    assert (first.iommu_group, first.iommu_type, first.is_translated) == ("17", "DMA-FQ", True)
    assert first.path == ("0000:16:01.0", "0000:17:00.0")
    assert first.acs == {"0000:16:01.0": ("request redirect", "completion redirect")}
    assert (first.numa_node, host_facts.gpus[2].numa_node) == (0, 1)
    assert first.link == {
        "width": 16, "max_width": 16, "slot_width": 16, "speed": "16.0 GT/s PCIe", "max_speed": "16.0 GT/s PCIe",
    }  # fmt: skip
    assert first.counters["pcie replays"] == 7
    assert first.nvlinks is None
    assert (first.vbios, first.board) == ("94.02.5C.00.0D", "900-0")
    links = {(link.a, link.b): (link.ancestor, link.topology, link.peer) for link in host_facts.links}
    assert len(links) == 6
    assert links["cuda:0", "cuda:1"] == ("0000:16:01.0", "PIX", "ok")
    assert links["cuda:0", "cuda:2"] == ("host bridge", "SYS", "no path in the topology")
    assert host_facts.unread == {}
    assert decode_json(encode_json(host_facts), HostFacts) == host_facts


def test_devices_of_two_types_with_one_index_are_two_devices(tmp_path: Path) -> None:
    """`cuda:0` and `xpu:0` are two cards; a numerical variant of `cuda:0` is the same card."""
    first, second, *_ = gpus()
    variant = msgspec.structs.replace(first, spec=DeviceSpec(type="cuda", index=0, variant="tf32"))
    intel = msgspec.structs.replace(second, spec=DeviceSpec(type="xpu", index=0), uuid=None)
    host_facts = read_host([first, variant, intel], root=make_host(tmp_path), run=lambda _: None, tool=lambda _: None)
    assert [(gpu.name, gpu.pci_bus_id) for gpu in host_facts.gpus] == [
        ("cuda:0", "0000:17:00.0"), ("xpu:0", "0000:18:00.0"),
    ]  # fmt: skip
    assert [(link.a, link.b) for link in host_facts.links] == [("cuda:0", "xpu:0")]


def test_identity_does_not_translate(tmp_path: Path) -> None:
    host_facts = read(make_host(tmp_path, iommu="identity"), make_nvml())
    assert not any(gpu.is_translated for gpu in host_facts.gpus)
    assert host_facts.gpus[0].acs == {"0000:16:01.0": ()}


def test_what_cannot_be_read_has_a_reason(tmp_path: Path) -> None:
    host_facts = read(make_host(tmp_path / "user", root_user=False))
    assert host_facts.unread == {
        "kernel log": "the kernel's log is not readable without root",
        "acs": "not readable without root",
        "nvml": "NVIDIA's management library does not answer",
    }
    bare = read(tmp_path / "nothing")
    assert (bare.boot_id, bare.uptime_s, bare.iommu, bare.iommu_options) == (None, None, None, ())
    assert bare.gpus[0].path == ()
    assert bare.links[0].ancestor is None
    assert "pci" in bare.unread


def test_a_bridge_without_acs_and_a_chain_that_leads_in_a_circle(tmp_path: Path) -> None:
    root = make_host(tmp_path, acs=None)
    assert read(root).gpus[0].acs == {}
    port = root / "sys/bus/pci/devices/0000:16:01.0/config"
    raw = bytearray(port.read_bytes())
    raw[0x148:0x14C] = (0x0002 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    port.write_bytes(bytes(raw))
    assert read(root).gpus[0].acs == {}


def test_lines_of_the_log(tmp_path: Path) -> None:
    lines, why = read_log(make_host(tmp_path, log=LOG))
    assert why is None
    assert lines == (
        "[5.140900] NVRM: Xid (PCI:0000:17:00): 31, pid=1, MMU Fault",
        "[5.140901] AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0012 address=0xff]",
    )
    asked: list[Sequence[str]] = []

    def journal(command: Sequence[str]) -> str:
        asked.append(command)
        return "[  1.0] host kernel: pcieport 0000:16:01.0: PCIe Bus Error: severity=Corrected\n"

    lines, why = read_log(tmp_path / "nothing", journal)
    assert (len(lines), why, asked[0][0]) == (1, None, "journalctl")


def test_a_library_that_knows_nothing_is_no_error(tmp_path: Path) -> None:
    class Nothing:
        class NVMLError(Exception):
            pass

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    host_facts = read(make_host(tmp_path), Nothing())
    assert all(gpu.counters == {} for gpu in host_facts.gpus)
    assert nvml.peer(Nothing(), "a", "b") is None


def test_instances_of_one_card_have_no_link_between_them(tmp_path: Path) -> None:
    card, other = gpus(2)
    instances = [
        msgspec.structs.replace(card, uuid=f"MIG-{i}", spec=DeviceSpec(type="cuda", index=i)) for i in range(2)
    ]
    other = msgspec.structs.replace(other, spec=DeviceSpec(type="cuda", index=2))
    found = read_host([*instances, other], root=make_host(tmp_path), run=lambda _: None)
    assert [gpu.name for gpu in found.gpus] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [(link.a, link.b) for link in found.links] == [("cuda:0", "cuda:2"), ("cuda:1", "cuda:2")]


def test_counters_that_rise_while_it_runs(tmp_path: Path) -> None:
    root = make_host(tmp_path, log=LOG)
    before = read(root, make_nvml())
    calm = since(before, read(root, make_nvml()))
    assert list(host_problems([calm])) == []
    (root / "dev/kmsg").write_text(LOG + "4,400,9000000,-;NVRM: Xid (PCI:0000:17:00): 63, row remapping\n")
    host_facts = since(before, read(root, make_nvml(uncorrected=2)))
    assert host_facts.gpus[0].after == {"ecc uncorrected, since boot": 2}
    assert host_facts.new_log == ("[9.000000] NVRM: Xid (PCI:0000:17:00): 63, row remapping",)
    found = list(host_problems([host_facts], workers=["cpu", "host-a:cuda:0", "cuda:0", "cuda:10"]))
    assert [(f.kind, f.severity) for f in found] == [*[("ecc", "error")] * 4, ("kernel-log", "warning")]
    assert "cuda:0 (GPU-0): counters rose during the run: ecc uncorrected, since boot from 0 to 2" in found[0].message
    assert found[0].workers == ("host-a:cuda:0", "cuda:0")


def test_a_boot_between_captures_is_told(tmp_path: Path) -> None:
    host_facts = read(make_host(tmp_path))
    assert list(host_problems([host_facts, host_facts])) == []
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("another\n")
    (note,) = host_problems([host_facts, read(tmp_path)])
    assert (note.kind, note.severity) == ("rebooted", "note")
    assert f"{host_facts.host} was rebooted between these captures" in note.message


def add_card(root: Path, address: str, vendor: str, kind: str, driver: str | None) -> None:
    """Add a card to a machine made of files."""
    device = root / "sys/bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    if driver is not None:
        (root / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(root / "sys/bus/pci/drivers" / driver)


def without_device(root: Path, build: str = "cuda") -> HostFacts:
    """Read a machine whose torch finds no device."""
    auto = AutoChoice(build=build, reason="NVML: Driver Not Loaded")
    cpu = DeviceInfo(spec=DeviceSpec(type="cpu"), architecture="x86-64", model="chip", auto=auto)
    return read_host([cpu], root=root, run=lambda _: None)


def test_cards_that_torch_is_built_for_and_cannot_use(tmp_path: Path) -> None:
    root = make_host(tmp_path)
    add_card(root, "0000:01:00.0", "0x10de", "0x030200", None)
    add_card(root, "0000:02:00.0", "0x10de", "0x030000", "nouveau")
    add_card(root, "0000:02:00.1", "0x10de", "0x040300", "snd_hda_intel")  # its sound
    add_card(root, "0000:03:00.0", "0x10de", "0x030200", "vfio-pci")  # a virtual machine has it
    add_card(root, "0000:00:02.0", "0x8086", "0x030000", "i915")  # graphics of the processor
    add_card(root, "0000:04:00.0", "0x1002", "0x120000", "amdgpu")
    assert without_device(root).unused_cards == ("0000:01:00.0 (no driver)", "0000:02:00.0 (driver nouveau)")
    assert without_device(root, "hip").unused_cards == ("0000:04:00.0 (driver amdgpu)",)
    assert read(root).unused_cards == ()
    assert without_device(tmp_path / "nothing").unused_cards == ()


def test_a_torch_that_finds_no_device_is_a_warning_and_urgent_where_there_is_a_card(tmp_path: Path) -> None:
    bare = without_device(make_host(tmp_path / "bare"))
    (finding,) = host_problems([bare, msgspec.structs.replace(bare, host="other")])
    assert (finding.kind, finding.severity) == ("no-accelerator", "warning")
    assert finding.message == (
        f"{bare.host}, other: torch is built for CUDA and finds no device (NVML: Driver Not Loaded): "
        "the CPU alone was checked"
    )
    assert "CUDA_VISIBLE_DEVICES=" in (finding.next or "")
    add_card(make_host(tmp_path / "full"), "0000:01:00.0", "0x10de", "0x030200", None)
    full = without_device(tmp_path / "full")
    (finding,) = host_problems([full])
    assert (finding.kind, finding.severity) == ("unused-card", "warning")
    assert "although there is 1 card for it" in finding.message
    assert finding.detail == (f"{full.host}: 0000:01:00.0 (no driver)",)
    assert list(host_problems([msgspec.structs.replace(full, auto=AutoChoice())])) == []
    assert list(host_problems([msgspec.structs.replace(full, auto=None)])) == []
