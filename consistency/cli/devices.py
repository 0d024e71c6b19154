"""What `consistency devices` prints."""

from __future__ import annotations

from rich.console import Console

from consistency.capture.wording import size
from consistency.devices.spec import DeviceInfo
from consistency.report.console import plain_cells, print_table, without_trailing_blanks


def print_devices(devices: list[DeviceInfo], console: Console) -> None:
    """Print the devices of this machine."""
    rows = [
        plain_cells(
            info.spec.name, info.architecture, f"{info.model} (simulated)" if info.simulated else info.model,
            None if info.memory_bytes is None else size(info.memory_bytes), info.uuid, info.pci_bus_id, info.driver,
        )
        for info in devices
    ]  # fmt: skip
    with without_trailing_blanks(console):
        print_table(console, ("device", "architecture", "model", "memory", "uuid", "PCI bus id", "driver"), rows)
