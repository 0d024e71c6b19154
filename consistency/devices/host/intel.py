"""What `xpu-smi` reports of Intel's GPUs: driver and firmware."""

from __future__ import annotations

from consistency.devices.host.pci import address
from consistency.devices.host.tools import Card, Cards, Run, missing, part, read_json, rows_of, text_of


def read(run: Run) -> tuple[Cards, str | None]:
    """Return every GPU that the tool lists, and None; or nothing, and the reason."""
    cards: Cards = {}
    for row in rows_of(read_json(run(["xpu-smi", "discovery", "-j"])), "device_list"):
        pci_bus_id, number = text_of(row.get("pci_bdf_address")), text_of(row.get("device_id"))
        if pci_bus_id is not None and number is not None:
            cards[address(pci_bus_id)] = _card(run, number)
    return cards, None if cards else "xpu-smi does not answer"


def _card(run: Run, number: str) -> Card:
    """Return the GPU with a number, which the tool is asked for by itself: the list has neither driver nor firmware."""
    answer = read_json(run(["xpu-smi", "discovery", "-d", number, "-j"]))
    # some versions answer for one device with a list of it
    row = next(iter(rows_of(answer, "device_list")), None) or part({"": answer}, "")
    facts = {"driver": text_of(row.get("driver_version")), "firmware": text_of(row.get("gfx_firmware_version"))}
    return Card(
        driver=facts["driver"],
        vbios=facts["firmware"],
        unread=missing("xpu-smi", facts) | {"error counters": "not read from xpu-smi"},
    )
