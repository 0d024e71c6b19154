"""`consistency devices`: list the devices of this host."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from consistency.cli.output import print_json

if TYPE_CHECKING:
    from consistency.devices.spec import DeviceInfo

_FIELDS = (
    "architecture",
    "model",
    "uuid",
    "pci_bus_id",
    "driver",
    "capability",
    "memory_bytes",
    "simulated",
    "not_reported",
)

EXAMPLES = (
    ("the names that --devices takes", "consistency devices"),
    ("for scripts, with UUID and PCI bus id", "consistency devices --json"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command("devices", _devices, "list the devices of this host", EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _devices(parsed: argparse.Namespace) -> int:
    """Run the command."""
    from consistency.devices.discovery import discover

    devices = list(discover())
    if parsed.json:
        print_json([_as_table(info) for info in devices])
    else:
        _print_devices(devices)
    return 0


def _as_table(info: DeviceInfo) -> dict[str, object]:
    """Return a device for JSON."""
    from consistency.devices.discovery import why_unusable

    fields = {name: getattr(info, name) for name in _FIELDS}
    return {"name": info.spec.name, **fields, "unusable": why_unusable(info)}


def _print_devices(devices: Sequence[DeviceInfo]) -> None:
    """Print a table of devices, and below it what is wrong with them or not known."""
    from consistency.capture.wording import size
    from consistency.devices.discovery import auto_choice, why_unusable
    from consistency.devices.vendors import PLATFORMS
    from consistency.report.console import make_console, plain_cells, print_table, without_trailing_blanks

    rows = [
        plain_cells(
            info.spec.name,
            info.architecture,
            f"{info.model} (simulated)" if info.simulated else info.model,
            None if info.memory_bytes is None else size(info.memory_bytes),
            info.uuid,
            info.pci_bus_id,
            info.driver,
        )
        for info in devices
    ]
    console = make_console()
    with without_trailing_blanks(console):
        print_table(console, ("device", "architecture", "model", "memory", "uuid", "PCI bus id", "driver"), rows)
        for info in devices:
            unusable = why_unusable(info)
            if unusable:
                console.print(f"{info.spec.name} cannot be used: {unusable}", markup=False)
            for fact, reason in info.not_reported.items():
                console.print(f"{info.spec.name}: {info.asked} does not report {fact}: {reason}", markup=False)
        choice = auto_choice()
        if choice.build:
            platform = PLATFORMS[choice.build].name
            console.print(f"torch is built for {platform} and finds no device: {choice.reason}", markup=False)
