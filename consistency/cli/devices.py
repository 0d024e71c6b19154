"""What `consistency devices` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from consistency.devices.spec import DeviceInfo
from consistency.report.terminal import without_trailing_blanks
from consistency.report.text import clean


def print_devices(devices: list[DeviceInfo], console: Console) -> None:
    """Print the devices of this machine."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("device", "architecture", "model", "memory", "uuid", "PCI bus id", "driver"):
        table.add_column(title, header_style="bold", overflow="fold")
    for info in devices:
        memory = "" if info.memory_bytes is None else f"{info.memory_bytes / 2**30:.1f} GiB"
        model = f"{info.model} (simulated)" if info.simulated else info.model
        cells = (info.spec.name, info.architecture, model, memory, info.uuid, info.pci_bus_id, info.driver)
        table.add_row(*(Text(clean(cell or "")) for cell in cells))
    with without_trailing_blanks(console):
        console.print(table)
