"""`consistency devices`: list the devices of this host."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from consistency.cli.output import print_json

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
    from consistency.devices.discovery import auto_choice, discover, why_unusable

    found = list(discover())
    if parsed.json:
        print_json(
            [
                {
                    "name": info.spec.name,
                    **{name: getattr(info, name) for name in _FIELDS},
                    "unusable": why_unusable(info),
                }
                for info in found
            ]
        )
    else:
        from consistency.capture.wording import size
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
            for info in found
        ]
        with without_trailing_blanks(console := make_console()):
            print_table(console, ("device", "architecture", "model", "memory", "uuid", "PCI bus id", "driver"), rows)
            for info in found:
                if reason := why_unusable(info):
                    console.print(f"{info.spec.name} cannot be used: {reason}", markup=False)
                for what, reason in info.not_reported.items():
                    console.print(f"{info.spec.name}: {info.asked} does not report {what}: {reason}", markup=False)
            if (none := auto_choice()).build:
                platform = PLATFORMS[none.build].name
                console.print(f"torch is built for {platform} and finds no device: {none.reason}", markup=False)
    return 0
