"""Host problems -> findings: error counters that rose, kernel messages, a reboot between captures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from consistency.capture.wording import counted, some
from consistency.comparison.kinds import FindingKind
from consistency.comparison.result import Finding
from consistency.devices.host.facts import Gpu, HostFacts
from consistency.devices.host.kernel_log import LOGGED
from consistency.devices.vendors import PLATFORMS, own_test

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
                kind=FindingKind.KERNEL_LOG,
                severity="warning",
                message=f"{host_facts.host}: the kernel logged {LOGGED} during the run",
                detail=host_facts.new_log[-_MOST_LINES:],
            )
    yield from _without_accelerators(hosts)
    yield from _reboots(hosts)


def _without_accelerators(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    same: dict[tuple[str, str, bool], list[HostFacts]] = {}
    for host_facts in hosts:
        if host_facts.auto is not None and host_facts.auto.build:
            key = (host_facts.auto.build, host_facts.auto.reason, bool(host_facts.unused_cards))
            same.setdefault(key, []).append(host_facts)
    for (build, reason, has_cards), found in same.items():
        platform, names = PLATFORMS[build], list(dict.fromkeys(host_facts.host for host_facts in found))
        cards = [f"{host_facts.host}: {card}" for host_facts in found for card in host_facts.unused_cards]
        what = f"torch is built for {platform.name} and finds no device"
        if has_cards:
            what += f", although there {'is' if len(cards) == 1 else 'are'} {counted(len(cards), 'card')} for it"
        meant = f"; {platform.hidden_by} in the environment says that none is meant" if platform.hidden_by else ""
        yield Finding(
            kind=FindingKind.UNUSED_CARD if has_cards else FindingKind.NO_ACCELERATOR,
            severity="warning",
            message=f"{some(names)}: {what} ({reason}): the CPU alone was checked",
            detail=tuple(cards[:_MOST_LINES]),
            next=(
                "install or repair its driver; a container has to be given its devices"
                if has_cards
                else f"install or repair the driver{meant}"
            ),
        )


def _risen(host_facts: HostFacts, gpu: Gpu, workers: Sequence[str]) -> Iterator[Finding]:
    if not gpu.after:
        return
    lost = [name for name in gpu.after if any(word in name for word in _WORRYING)]
    of_memory = any("ecc" in name or "row" in name for name in gpu.after)
    risen = ", ".join(f"{name} from {gpu.counters.get(name, 0)} to {value}" for name, value in gpu.after.items())
    yield Finding(
        kind=FindingKind.ECC if of_memory else FindingKind.BUS_ERRORS,
        severity="error" if lost else "warning",
        message=f"{host_facts.host}: {gpu.name} ({gpu.uuid or gpu.pci_bus_id}): counters rose during the run: {risen}",
        workers=tuple(name for name in workers if name == gpu.name or name.endswith(f":{gpu.name}")),
        next=f"test {gpu.name}: {own_test(gpu.vendor)}",
    )


def _reboots(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    by_host: dict[str, list[HostFacts]] = {}
    for host_facts in hosts:
        by_host.setdefault(host_facts.host, []).append(host_facts)
    for host, found in by_host.items():
        boots = dict.fromkeys(host_facts.boot_id for host_facts in found if host_facts.boot_id is not None)
        if len(boots) > 1:
            yield Finding(
                kind=FindingKind.REBOOTED,
                severity="note",
                message=f"{host} was rebooted between these captures: a reboot may have fixed what differs",
                detail=tuple(f"boot {boot}" for boot in boots),
            )
