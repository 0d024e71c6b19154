"""Host problems -> findings: error counters that rose, kernel messages, a reboot between captures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from consistency.comparison.result import Finding
from consistency.devices.host.facts import Gpu, HostFacts
from consistency.devices.host.kernel_log import LOGGED

_MOST_LINES = 8
_WORRYING = ("uncorrected", "failed")  # data was lost; a corrected error is a warning of that


def find_host_problems(hosts: Sequence[HostFacts], *, workers: Sequence[str] = ()) -> Iterator[Finding]:
    """Return the problems of the hosts of a comparison.

    Parameters
    ----------
    hosts : sequence of HostFacts
        One per capture.
    workers : sequence of str
        Names of all workers.
    """
    for host_facts in hosts:
        for gpu in host_facts.gpus:
            yield from _risen(host_facts, gpu, workers)
        if host_facts.new_log:
            yield Finding(
                kind="kernel-log",
                severity="warning",
                message=f"{host_facts.host}: the kernel logged {LOGGED} during the run",
                detail=host_facts.new_log[-_MOST_LINES:],
            )
    yield from _reboots(hosts)


def _risen(host_facts: HostFacts, gpu: Gpu, workers: Sequence[str]) -> Iterator[Finding]:
    if not gpu.after:
        return
    lost = [name for name in gpu.after if any(word in name for word in _WORRYING)]
    risen = ", ".join(f"{name} from {gpu.counters.get(name, 0)} to {value}" for name, value in gpu.after.items())
    yield Finding(
        kind="ecc" if any("ecc" in name or "row" in name for name in gpu.after) else "bus-errors",
        severity="error" if lost else "warning",
        message=f"{host_facts.host}: {gpu.name} ({gpu.uuid or gpu.pci_bus_id}): counters rose during the run: {risen}",
        workers=tuple(name for name in workers if name == gpu.name or name.endswith(f":{gpu.name}")),
        next=f"test {gpu.name}: dcgmi diag -r 3, or the vendor's own tool",
    )


def _reboots(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    by_host: dict[str, list[HostFacts]] = {}
    for host_facts in hosts:
        by_host.setdefault(host_facts.host, []).append(host_facts)
    for host, found in by_host.items():
        boots = dict.fromkeys(host_facts.boot_id for host_facts in found if host_facts.boot_id is not None)
        if len(boots) > 1:
            yield Finding(
                kind="rebooted",
                severity="note",
                message=f"{host} was rebooted between these captures: a reboot may have fixed what differs",
                detail=tuple(f"boot {boot}" for boot in boots),
            )
