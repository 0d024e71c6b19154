"""What the vendors' tools answer, reduced to what is read and its neighbours.

The form, and the values that no machine is known by, are those of published outputs; serial numbers, UUIDs and PCI
addresses are replaced.

* `amd-smi static --json`, with `gpu_data`: https://github.com/nathaninline/ajean/issues/39 (RX 7800 XT); `ifwi` and an
  Instinct's board: https://github.com/ROCm/rocm-systems/pull/2987 (MI350X); a plain list, as before ROCm 7:
  https://github.com/henrygd/beszel/issues/737
* `amd-smi metric --json`: https://github.com/joular/powerjoular/issues/67 and the issues above
* `rocm-smi --json`: https://github.com/jurkovic-nikola/OpenLinkHub/pull/27 (RX 7900 XT); a GPU within a processor,
  which reports less: https://github.com/sebhildebrandt/systeminformation/pull/960
* `xpu-smi discovery -j`: `doc/smi_user_guide.md` of https://github.com/intel/xpumanager; of one device:
  https://github.com/intel/xpumanager/issues/127 (Arc Pro B60)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WARNING = "amdsmi_interface.py:3569: SyntaxWarning: 'return' in a 'finally' block\n  return return_dictionary\n"
"""In some distributions before the answer."""


def amd_static(*places: str) -> list[dict[str, Any]]:
    """Return the rows of `amd-smi static`: an Instinct at the first place, Radeons at the others."""
    instinct = {
        "asic": {"market_name": "AMD Instinct MI350X", "vendor_id": "0x1002", "target_graphics_version": "gfx950"},
        "bus": {"max_pcie_width": 16, "max_pcie_speed": {"value": 32, "unit": "GT/s"}, "slot_type": "OAM"},
        "ifwi": {"name": "AMD MI350X", "part_number": "113-M350-01-1K0-920A", "version": "00154951"},
        "driver": {"name": "amdgpu", "version": "6.18.3"},
        "board": {"model_number": "102-G36212-0C", "product_name": "AMD Instinct MI350 OAM"},
    }
    radeon = {
        "asic": {"market_name": "AMD Radeon RX 7800 XT", "vendor_id": "0x1002", "target_graphics_version": "gfx1101"},
        "bus": {"max_pcie_width": 16, "max_pcie_speed": {"value": 16, "unit": "GT/s"}, "slot_type": "PCIE"},
        "vbios": {"name": "NAVI32", "part_number": "N/A", "version": "00117772"},
        "driver": {"name": "amdgpu", "version": "Linuxversion6.17.7-ba14.fc43.x86_64"},
        "board": {"model_number": "N/A", "product_name": "N/A"},
    }
    rows: list[dict[str, Any]] = []
    for i, place in enumerate(places):
        row: dict[str, Any] = {**(radeon if i else instinct)}
        rows.append({"gpu": i, **row, "bus": {"bdf": place, **row["bus"]}})
    return rows


def amd_metric(count: int, *, uncorrected: int = 0) -> list[dict[str, Any]]:
    """Return the rows of `amd-smi metric`; a Radeon does not count replays."""
    ecc = {"total_correctable_count": 2, "total_uncorrectable_count": uncorrected, "total_deferred_count": 0}
    return [
        {"gpu": i, "pcie": {"width": 16, "replay_count": 0 if i == 0 else "N/A"}, "ecc": {**ecc}} for i in range(count)
    ]


def rocm_smi(place: str) -> dict[str, Any]:
    """Return the answer of `rocm-smi` of two GPUs, one of which is within a processor."""
    return {
        "card0": {"PCI Bus": place.upper(), "VBIOS version": "113-APM7199-002", "PCIe Replay Count": "0"},
        "card1": {"PCI Bus": "0000:C4:00.0", "VBIOS version": "113-PHXGENERIC-001", "PCIe Replay Count": "N/A"},
        "system": {"Driver version": "6.10.5"},
    }


def xpu_list(place: str) -> dict[str, Any]:
    """Return the answer of `xpu-smi discovery -j`."""
    row = {"device_id": 0, "device_name": "Intel(R) Graphics [0xe211]", "device_type": "GPU", "pci_device_id": "0xe211"}
    return {"device_list": [{**row, "pci_bdf_address": place, "vendor_name": "Intel(R) Corporation"}]}


def xpu_device(**changed: str) -> dict[str, Any]:
    """Return the answer of `xpu-smi discovery -d 0 -j`."""
    found = {
        "device_id": 0, "driver_version": "7B7A46009E666C4D10E1134", "gfx_firmware_version": "BMG__21.1180",
        "memory_ecc_state": "disabled", "pcie_generation": "5", "serial_number": "unknown",
    }  # fmt: skip
    return {**found, **changed}


def answers(of: Mapping[str, Any], *, before: str = "") -> Callable[[Sequence[str]], str | None]:
    """Return a tool runner that has an answer for each beginning of a command, and none for others."""

    def run(command: Sequence[str]) -> str | None:
        found = next((answer for start, answer in of.items() if " ".join(command).startswith(start)), None)
        return None if found is None else before + json.dumps(found, indent=4)

    return run
