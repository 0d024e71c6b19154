"""What the machines themselves give cause to say: counters that rose, lines of the kernel, a boot between captures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from consistency.comparison.result import Finding
from consistency.devices.host.facts import Box, Gpu
from consistency.devices.host.kernel_log import LOGGED

_MOST_LINES = 8
_WORRYING = ("uncorrected", "failed")  # data was lost; a corrected error is a warning of that


def find_box(boxes: Sequence[Box], *, workers: Sequence[str] = ()) -> Iterator[Finding]:
    """Return what is to be said of the machines of a comparison.

    Parameters
    ----------
    boxes : sequence of Box
        One per capture.
    workers : sequence of str
        Names of all workers, of which a GPU that is named here is one.
    """
    for box in boxes:
        for gpu in box.gpus:
            yield from _risen(box, gpu, workers)
        if box.new_log:
            yield Finding(
                kind="kernel-log",
                severity="warning",
                message=f"{box.host}: while it ran the kernel wrote of {LOGGED}",
                detail=box.new_log[-_MOST_LINES:],
            )
    yield from _reboots(boxes)


def _risen(box: Box, gpu: Gpu, workers: Sequence[str]) -> Iterator[Finding]:
    if not gpu.after:
        return
    lost = [name for name in gpu.after if any(word in name for word in _WORRYING)]
    told = ", ".join(f"{name} from {gpu.counters.get(name, 0)} to {value}" for name, value in gpu.after.items())
    yield Finding(
        kind="ecc" if any("ecc" in name or "row" in name for name in gpu.after) else "bus-errors",
        severity="error" if lost else "warning",
        message=f"{box.host}: counters of {gpu.name} ({gpu.uuid or gpu.pci_bus_id}) rose while it ran: {told}",
        workers=tuple(name for name in workers if name == gpu.name or name.endswith(f":{gpu.name}")),
        next=f"have {gpu.name} tested: dcgmi diag -r 3, or the vendor's own",
    )


def _reboots(boxes: Sequence[Box]) -> Iterator[Finding]:
    by_host: dict[str, list[Box]] = {}
    for box in boxes:
        by_host.setdefault(box.host, []).append(box)
    for host, found in by_host.items():
        boots = dict.fromkeys(box.boot_id for box in found if box.boot_id is not None)
        if len(boots) > 1:
            yield Finding(
                kind="rebooted",
                severity="note",
                message=f"{host} was rebooted between these captures: what differs may be what a reboot cures",
                detail=tuple(f"boot {boot}" for boot in boots),
            )
