"""Problems of hosts -> findings, such as counters that rose and reboots; and what to fix first on a machine."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from consistency.capture.names import HOST
from consistency.capture.wording import counted, some
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.findings.transfers import Matrix, Pair, arrow, boot, matrices
from consistency.comparison.outcomes import gathered
from consistency.comparison.result import Comparison, Finding
from consistency.devices.host.facts import Gpu, HostFacts
from consistency.devices.host.kernel_log import LOGGED
from consistency.devices.host.nvml import ECC_UNCORRECTED, REMAP_FAILED, REMAP_PENDING
from consistency.devices.vendors import PLATFORMS, own_test

_MOST_LINES = 8
_WORRYING = ("uncorrected", "failed")  # data was lost; a corrected error is a warning of that


def find_host_problems(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report the problems of the hosts of a comparison."""
    return host_problems(evidence.hosts, workers=[worker.label for worker in evidence.workers])


def host_problems(hosts: Sequence[HostFacts], *, workers: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the problems of hosts.

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
                kind=kinds.KERNEL_LOG,
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
            kind=kinds.UNUSED_CARD if has_cards else kinds.NO_ACCELERATOR,
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
        kind=kinds.ECC if of_memory else kinds.BUS_ERRORS,
        severity="error" if lost else "warning",
        message=f"{host_facts.host}: {gpu.name} ({gpu.uuid or gpu.pci_bus_id}): counters rose during the run: {risen}",
        workers=tuple(name for name in workers if name == gpu.name or name.endswith(f":{gpu.name}")),
        next=f"test {gpu.name}: {own_test(gpu.vendor)}",
    )


def _reboots(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    by_host = gathered((host_facts.host, host_facts) for host_facts in hosts)
    for host, found in by_host.items():
        boots = dict.fromkeys(host_facts.boot_id for host_facts in found if host_facts.boot_id is not None)
        if len(boots) > 1:
            yield Finding(
                kind=kinds.REBOOTED,
                severity="note",
                message=f"{host} was rebooted between these captures: a reboot may have fixed what differs",
                detail=tuple(f"boot {boot}" for boot in boots),
            )


MOST_ADVICE = 8

_SLOW = 4
"""A pair is slow below a quarter of the median of its kind: a link of x4 in a slot of x16. Other workers copy at the
same time, which has been seen to halve the speed."""

_FEW_PAIRS = 3  # a median of fewer means nothing


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A fault or a risk in one sentence, and the fix; `urgent` where something is wrong already."""

    what: str
    fix: str | None = None
    urgent: bool = True


def advise(comparison: Comparison) -> tuple[Advice, ...]:
    """Return what to fix, present faults before risks."""
    found = [
        Advice(
            what=finding.message,
            fix=finding.next,
            urgent=finding.severity == "error" or finding.kind == kinds.UNUSED_CARD,
        )
        for finding in comparison.findings
        if finding.severity != "note"
    ]
    for host_facts in comparison.hosts:
        found += _of_host(host_facts, comparison)
    if not comparison.simulated:
        for matrix in matrices(comparison.tensors):
            found += _slow(matrix, _kinds(comparison.hosts))
    unique = {(advice.what, advice.fix): advice for advice in found}
    return tuple(sorted(unique.values(), key=lambda advice: not advice.urgent))


def about(host_facts: HostFacts) -> Iterator[str]:
    """Yield what is known of a host, a line per kind of fact."""
    yield f"{host_facts.host}: kernel {host_facts.kernel}, {boot(host_facts)}"
    options = f" ({' '.join(host_facts.iommu_options)})" if host_facts.iommu_options else ""
    yield f"IOMMU: {host_facts.iommu or 'unknown'}{options}"
    for gpu in host_facts.gpus:
        yield f"{gpu.name}: {', '.join(_facts(gpu))}"
    for link in host_facts.links:
        parts = [
            text
            for text in (link.nvlink and "NVLink", link.topology, link.ancestor and f"below {link.ancestor}")
            if text
        ]
        if link.peer is not None:
            parts.append(f"peer access {link.peer}")
        yield f"{link.a} and {link.b}: {', '.join(parts) or 'unknown'}"
    if host_facts.log:
        lines = counted(len(host_facts.log), "line")
        yield f"kernel log: {lines} of {LOGGED} since boot, the last: {host_facts.log[-1]}"
    for name, why in host_facts.unread.items():
        yield f"{name}: {why}"


def as_table(comparison: Comparison) -> dict[str, Any]:
    """Return what `doctor --json` prints."""
    return {
        "verdict": comparison.verdict,
        "workers": [{"name": w.name, "status": w.status, "reason": w.reason} for w in comparison.workers],
        "copies": [
            {
                "capture": matrix.home,
                "source": source,
                "destination": destination,
                "verdict": "wrong" if cell.own else "fine" if cell.is_fine else "not tried",
                "wrong": cell.own,
                "gb_per_s": cell.gb_per_s,
            }
            for matrix in matrices(comparison.tensors)
            for (source, destination), cell in matrix.cells.items()
        ],
        "findings": comparison.findings,
        "hosts": comparison.hosts,
        "fix": advise(comparison),
    }


def _of_host(host_facts: HostFacts, comparison: Comparison) -> Iterator[Advice]:
    for gpu in host_facts.gpus:
        if gpu.counters.get(REMAP_FAILED):
            yield Advice(what=f"{gpu.name} has bad memory rows and no spare rows left", fix="replace it")
        elif gpu.counters.get(REMAP_PENDING):
            yield Advice(what=f"{gpu.name} waits for a reset to remap bad memory rows", fix="reset it")
        lost = gpu.counters.get(ECC_UNCORRECTED, 0)
        if lost and not gpu.after:  # a counter that rose during the run is a finding
            what = f"{gpu.name} has lost data {lost} times since boot (uncorrected ECC errors)"
            yield Advice(what=what, fix=f"test it: {own_test(gpu.vendor)}")
        if gpu.lanes_lost is not None:
            has, supported = gpu.lanes_lost
            what = f"{gpu.name} has {has} PCIe lanes; it and its slot support {supported}"
            yield Advice(what=what, fix="reseat it, and check its riser", urgent=False)
    if host_facts.log and not host_facts.new_log:
        what = f"the kernel logged {counted(len(host_facts.log), 'line')} of {LOGGED} since boot"
        yield Advice(what=what, fix=f"check them: {host_facts.log[-1]}", urgent=False)
    translated = [gpu.name for gpu in host_facts.gpus if gpu.is_translated]
    if len(host_facts.gpus) > 1 and translated and comparison.verdict == "consistent":
        yield Advice(
            what=f"the IOMMU translates peer writes of {', '.join(translated)}; no copy was wrong in this run",
            fix="boot with iommu=pt on the kernel's command line to bypass it",
            urgent=False,
        )


def _kinds(hosts: Sequence[HostFacts]) -> dict[Pair, str]:
    """Return how two devices are connected, by their names; nothing where hosts have such names connected otherwise."""
    found: dict[Pair, set[str | None]] = {}
    for link in (link for host_facts in hosts for link in host_facts.links):
        for pair in ((link.a, link.b), (link.b, link.a)):
            found.setdefault(pair, set()).add(link.kind)
    return {pair: kind for pair, kinds in found.items() if len(kinds) == 1 for kind in kinds if kind is not None}


def _slow(matrix: Matrix, kinds: Mapping[Pair, str]) -> Iterator[Advice]:
    """Name pairs that are slow beside those of their kind: some boxes join only some of their GPUs by NVLink."""
    of_kind: dict[str, dict[Pair, float]] = {}
    for pair, cell in matrix.cells.items():
        if cell.gb_per_s is not None and pair[0] != pair[1]:
            kind = HOST if HOST in pair else kinds.get(pair, "")
            of_kind.setdefault(kind, {})[pair] = cell.gb_per_s
    for speeds in of_kind.values():
        if len(speeds) < _FEW_PAIRS:
            continue
        median = statistics.median(speeds.values())
        slow = [pair for pair, speed in speeds.items() if speed < median / _SLOW]
        if slow:
            named = ", ".join(f"{arrow(pair)} {speeds[pair]:.3g} GB/s" for pair in slow[:4])
            yield Advice(
                what=f"slow, the median of its kind is {median:.3g} GB/s: {named}",
                fix="check its link: width, speed, and its path in nvidia-smi topo -m",
                urgent=False,
            )


def _facts(gpu: Gpu) -> Iterator[str]:
    yield f"PCI {gpu.pci_bus_id}"
    if gpu.iommu_type is not None:
        yield f"IOMMU group {gpu.iommu_group} {gpu.iommu_type}"
    if "width" in gpu.link:
        yield f"link x{gpu.link['width']} {gpu.link.get('speed', '')}".rstrip()
    if gpu.numa_node is not None:
        yield f"NUMA node {gpu.numa_node}"
    if gpu.nvlinks is not None:
        yield f"{gpu.nvlinks} NVLinks up"
    on = [f"{bridge}: {', '.join(controls)}" for bridge, controls in gpu.acs.items() if controls]
    if on:
        yield f"ACS on at {'; '.join(on)}"
    raised = {name: value for name, value in gpu.counters.items() if value}
    if raised:
        yield ", ".join(f"{name} {value}" for name, value in raised.items())
    if gpu.driver is not None:
        yield f"driver {gpu.driver}"


FINDERS = (Finder(name="host problems", phase=Phase.HOSTS, position=1, find=find_host_problems),)
