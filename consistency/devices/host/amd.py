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
    """Return every GPU that the tools list, or nothing and the reason."""
    found = _amd_smi(run) or _rocm_smi(run)
    return found, None if found else "neither amd-smi nor rocm-smi answers"


def _amd_smi(run: Run) -> Cards:
    metrics = {row.get("gpu"): row for row in rows_of(read_json(run(["amd-smi", "metric", "--json"])), "gpu_data")}
    cards: Cards = {}
    for row in rows_of(read_json(run(["amd-smi", "static", "--json"])), "gpu_data"):
        place = text_of(part(row, "bus").get("bdf"))
        if place is not None:
            cards[address(place)] = _card(row, metrics.get(row.get("gpu"), {}))
    return cards


def _card(static: Mapping[str, Any], metric: Mapping[str, Any]) -> Card:
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
    answer = read_json(run(_ROCM_SMI))
    if not isinstance(answer, Mapping):
        return {}
    driver = text_of(part(answer, "system").get("Driver version"))
    cards: Cards = {}
    for name in answer:
        row = part(answer, name)
        place = text_of(row.get("PCI Bus"))
        if place is None:
            continue
        vbios, replays = text_of(row.get("VBIOS version")), number_of(row.get("PCIe Replay Count"))
        absent = missing("rocm-smi", {"driver": driver, "VBIOS": vbios, REPLAYS: replays, "board": None, "ecc": None})
        counters = {} if replays is None else {REPLAYS: replays}
        cards[address(place)] = Card(driver=driver, vbios=vbios, counters=counters, unread=absent)
    return cards
