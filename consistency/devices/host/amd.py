"""What `amd-smi`, or else `rocm-smi`, reports of AMD's GPUs: driver, firmware, board and error counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from consistency.devices.host.nvml import ECC_CORRECTED, ECC_UNCORRECTED, REPLAYS
from consistency.devices.host.pci import address
from consistency.devices.host.tools import Card, Cards, Run, missing, number_of, part, read_json, rows_of, text_of

ECC_DEFERRED = "ecc deferred, since boot"

_ROCM_SMI = ("rocm-smi", "--showbus", "--showvbios", "--showreplaycount", "--showdriverversion", "--json")

_ECC = {
    ECC_CORRECTED: "total_correctable_count",
    ECC_UNCORRECTED: "total_uncorrectable_count",
    ECC_DEFERRED: "total_deferred_count",
}


def read(run: Run) -> tuple[Cards, str | None]:
    """Return every GPU that the tools list, and None; or nothing, and the reason."""
    cards = _amd_smi(run) or _rocm_smi(run)
    return cards, None if cards else "neither amd-smi nor rocm-smi answers"


def _amd_smi(run: Run) -> Cards:
    """Return the GPUs that `amd-smi` lists; its two commands number them alike."""
    metrics = {row.get("gpu"): row for row in rows_of(read_json(run(["amd-smi", "metric", "--json"])), "gpu_data")}
    cards: Cards = {}
    for row in rows_of(read_json(run(["amd-smi", "static", "--json"])), "gpu_data"):
        pci_bus_id = text_of(part(row, "bus").get("bdf"))
        if pci_bus_id is not None:
            cards[address(pci_bus_id)] = _card(row, metrics.get(row.get("gpu"), {}))
    return cards


def _card(static: Mapping[str, Any], metric: Mapping[str, Any]) -> Card:
    """Return a GPU by its rows in the answers of `amd-smi static` and `amd-smi metric`."""
    # `ifwi` since ROCm 7, `vbios` before; the part number names the image, and the version is the same for many
    firmware = part(static, "ifwi", "vbios")
    facts = {
        "driver": text_of(part(static, "driver").get("version")),
        "VBIOS": text_of(firmware.get("part_number")) or text_of(firmware.get("version")),
        "board": text_of(part(static, "board").get("model_number")),
    }
    counters = {name: number_of(part(metric, "ecc").get(key)) for name, key in _ECC.items()}
    counters[REPLAYS] = number_of(part(metric, "pcie").get("replay_count"))
    return Card(
        driver=facts["driver"],
        vbios=facts["VBIOS"],
        board=facts["board"],
        counters={name: value for name, value in counters.items() if value is not None},
        unread=missing("amd-smi", {**facts, **counters}),
    )


def _rocm_smi(run: Run) -> Cards:
    """Return the GPUs that `rocm-smi` lists, the older tool, which reports less."""
    answer = read_json(run(_ROCM_SMI))
    if not isinstance(answer, Mapping):
        return {}
    driver = text_of(part(answer, "system").get("Driver version"))
    cards: Cards = {}
    for name in answer:
        row = part(answer, name)
        pci_bus_id = text_of(row.get("PCI Bus"))
        if pci_bus_id is None:  # not a card, such as `system`
            continue
        vbios, replays = text_of(row.get("VBIOS version")), number_of(row.get("PCIe Replay Count"))
        facts = {"driver": driver, "VBIOS": vbios, REPLAYS: replays, "board": None, "ecc": None}
        cards[address(pci_bus_id)] = Card(
            driver=driver,
            vbios=vbios,
            counters={} if replays is None else {REPLAYS: replays},
            unread=missing("rocm-smi", facts),
        )
    return cards
