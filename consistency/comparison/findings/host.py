"""Findings about problems of hosts, such as counters that rose and reboots; and advice on what to fix first."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from consistency.capture.names import HOST
from consistency.capture.wording import counted, some
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.findings.transfers import Cell, Matrix, Pair, arrow, boot, matrices
from consistency.comparison.outcomes import group_by_key
from consistency.comparison.result import Comparison, Finding, Severity
from consistency.devices.host.facts import Gpu, HostFacts, Link
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
        The facts of one host per capture.
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
    """Report hosts on which the CPU alone was checked, though torch is built for accelerators."""
    same_hosts: dict[tuple[str, str, bool], list[HostFacts]] = {}
    for host_facts in hosts:
        if host_facts.auto is not None and host_facts.auto.build:
            key = (host_facts.auto.build, host_facts.auto.reason, bool(host_facts.unused_cards))
            same_hosts.setdefault(key, []).append(host_facts)
    # hosts with one problem are one finding
    for (build, reason, has_cards), members in same_hosts.items():
        platform = PLATFORMS[build]
        names = dict.fromkeys(host_facts.host for host_facts in members)
        cards = list(_unused_cards(members))
        kind = kinds.NO_ACCELERATOR
        problem = f"torch is built for {platform.name} and finds no device"
        advice = "install or repair the driver"
        if platform.hidden_by:
            advice += f"; {platform.hidden_by} in the environment hides all devices"
        if has_cards:
            kind = kinds.UNUSED_CARD
            verb = "is" if len(cards) == 1 else "are"
            problem += f", although there {verb} {counted(len(cards), 'card')} for it"
            advice = "install or repair its driver; a container has to be given its devices"
        yield Finding(
            kind=kind,
            severity="warning",
            message=f"{some(list(names))}: {problem} ({reason}): the CPU alone was checked",
            detail=tuple(cards[:_MOST_LINES]),
            next=advice,
        )


def _unused_cards(hosts: Sequence[HostFacts]) -> Iterator[str]:
    """Yield the cards that torch does not see, each with its host."""
    for host_facts in hosts:
        for card in host_facts.unused_cards:
            yield f"{host_facts.host}: {card}"


def _risen(host_facts: HostFacts, gpu: Gpu, workers: Sequence[str]) -> Iterator[Finding]:
    """Report the counters of a GPU that rose during the run."""
    if not gpu.after:
        return
    lost_data = any(any(word in name for word in _WORRYING) for name in gpu.after)
    severity: Severity = "error" if lost_data else "warning"
    is_of_memory = any("ecc" in name or "row" in name for name in gpu.after)
    kind = kinds.ECC if is_of_memory else kinds.BUS_ERRORS
    counters = ", ".join(f"{name} from {gpu.counters.get(name, 0)} to {value}" for name, value in gpu.after.items())
    # the number of a device changes, its UUID and its PCI address name the card
    card = f"{gpu.name} ({gpu.uuid or gpu.pci_bus_id})"
    yield Finding(
        kind=kind,
        severity=severity,
        message=f"{host_facts.host}: {card}: counters rose during the run: {counters}",
        # with several captures, the name of a worker begins with its capture
        workers=tuple(name for name in workers if name == gpu.name or name.endswith(f":{gpu.name}")),
        next=f"test {gpu.name}: {own_test(gpu.vendor)}",
    )


def _reboots(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Report hosts that were rebooted between captures."""
    by_host = group_by_key((host_facts.host, host_facts) for host_facts in hosts)
    for host, members in by_host.items():
        boots = dict.fromkeys(host_facts.boot_id for host_facts in members if host_facts.boot_id is not None)
        if len(boots) > 1:
            yield Finding(
                kind=kinds.REBOOTED,
                severity="note",
                message=f"{host} was rebooted between these captures: a reboot may have fixed what differs",
                detail=tuple(f"boot {boot_id}" for boot_id in boots),
            )


MOST_ADVICE = 8

_SLOW = 4
"""A pair is slow below a quarter of the median of its kind: a link of x4 in a slot of x16. Other workers copy at the
same time, which has been seen to halve the speed."""

_FEW_PAIRS = 3  # a median of fewer means nothing
_MOST_SLOW_PAIRS = 4


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A fault or a risk in one sentence, and the fix; `urgent` where something is wrong already."""

    what: str
    fix: str | None = None
    urgent: bool = True


def advise(comparison: Comparison) -> tuple[Advice, ...]:
    """Return what to fix, present faults before risks."""
    advice = [
        Advice(
            what=finding.message,
            fix=finding.next,
            urgent=finding.severity == "error" or finding.kind == kinds.UNUSED_CARD,
        )
        for finding in comparison.findings
        if finding.severity != "note"
    ]
    for host_facts in comparison.hosts:
        advice += _advice_for_host(host_facts, comparison)
    # the speeds of simulated devices say nothing of links
    if not comparison.simulated:
        for matrix in matrices(comparison.tensors):
            advice += _slow_pairs(matrix, _link_kinds(comparison.hosts))
    # captures of one host repeat its facts
    unique = {(entry.what, entry.fix): entry for entry in advice}
    return tuple(sorted(unique.values(), key=lambda entry: not entry.urgent))


def about(host_facts: HostFacts) -> Iterator[str]:
    """Yield the facts of a host, a line per kind of fact."""
    yield f"{host_facts.host}: kernel {host_facts.kernel}, {boot(host_facts)}"
    options = f" ({' '.join(host_facts.iommu_options)})" if host_facts.iommu_options else ""
    yield f"IOMMU: {host_facts.iommu or 'unknown'}{options}"
    for gpu in host_facts.gpus:
        yield f"{gpu.name}: {', '.join(_gpu_facts(gpu))}"
    for link in host_facts.links:
        yield f"{link.a} and {link.b}: {', '.join(_link_facts(link)) or 'unknown'}"
    if host_facts.log:
        lines = counted(len(host_facts.log), "line")
        yield f"kernel log: {lines} of {LOGGED} since boot, the last: {host_facts.log[-1]}"
    for name, reason in host_facts.unread.items():
        yield f"{name}: {reason}"


def as_table(comparison: Comparison) -> dict[str, Any]:
    """Return what `doctor --json` prints."""
    return {
        "verdict": comparison.verdict,
        "workers": [
            {"name": worker.name, "status": worker.status, "reason": worker.reason} for worker in comparison.workers
        ],
        "copies": list(_copies(comparison)),
        "findings": comparison.findings,
        "hosts": comparison.hosts,
        "fix": advise(comparison),
    }


def _copies(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield the result of the copies of each pair of devices."""
    for matrix in matrices(comparison.tensors):
        for (source, destination), cell in matrix.cells.items():
            yield {
                "capture": matrix.home,
                "source": source,
                "destination": destination,
                "verdict": _verdict_on_copies(cell),
                "wrong": cell.own,
                "gb_per_s": cell.gb_per_s,
            }


def _verdict_on_copies(cell: Cell) -> str:
    if cell.own:
        return "wrong"
    return "fine" if cell.is_fine else "not tried"


def _advice_for_host(host_facts: HostFacts, comparison: Comparison) -> Iterator[Advice]:
    """Yield faults and risks of a host that are no findings of this run."""
    for gpu in host_facts.gpus:
        yield from _advice_for_gpu(gpu)
    # lines that were logged during the run are a finding
    if host_facts.log and not host_facts.new_log:
        problem = f"the kernel logged {counted(len(host_facts.log), 'line')} of {LOGGED} since boot"
        yield Advice(what=problem, fix=f"check them: {host_facts.log[-1]}", urgent=False)
    # where a copy is wrong, its finding names the IOMMU
    translated = [gpu.name for gpu in host_facts.gpus if gpu.is_translated]
    if len(host_facts.gpus) > 1 and translated and comparison.verdict == "consistent":
        yield Advice(
            what=f"the IOMMU translates peer writes of {', '.join(translated)}; no copy was wrong in this run",
            fix="boot with iommu=pt on the kernel's command line to bypass it",
            urgent=False,
        )


def _advice_for_gpu(gpu: Gpu) -> Iterator[Advice]:
    """Yield faults and risks that the counters and the link of a GPU show."""
    if gpu.counters.get(REMAP_FAILED):
        yield Advice(what=f"{gpu.name} has bad memory rows and no spare rows left", fix="replace it")
    elif gpu.counters.get(REMAP_PENDING):
        yield Advice(what=f"{gpu.name} waits for a reset to remap bad memory rows", fix="reset it")
    uncorrected = gpu.counters.get(ECC_UNCORRECTED, 0)
    if uncorrected and not gpu.after:  # a counter that rose during the run is a finding
        problem = f"{gpu.name} has lost data {uncorrected} times since boot (uncorrected ECC errors)"
        yield Advice(what=problem, fix=f"test it: {own_test(gpu.vendor)}")
    if gpu.lanes_lost is not None:
        lanes, supported = gpu.lanes_lost
        problem = f"{gpu.name} has {lanes} PCIe lanes; it and its slot support {supported}"
        yield Advice(what=problem, fix="reseat it, and check its riser", urgent=False)


def _link_kinds(hosts: Sequence[HostFacts]) -> dict[Pair, str]:
    """Return how two devices are connected, by their names.

    A pair is left out where hosts connect devices of these names in different ways.
    """
    kinds_by_pair: dict[Pair, set[str | None]] = {}
    for link in itertools.chain.from_iterable(host_facts.links for host_facts in hosts):
        for pair in ((link.a, link.b), (link.b, link.a)):
            kinds_by_pair.setdefault(pair, set()).add(link.kind)
    kind_by_pair = {}
    for pair, link_kinds in kinds_by_pair.items():
        if len(link_kinds) == 1:
            (kind,) = link_kinds
            if kind is not None:
                kind_by_pair[pair] = kind
    return kind_by_pair


def _slow_pairs(matrix: Matrix, link_kinds: Mapping[Pair, str]) -> Iterator[Advice]:
    """Name pairs that are slow for their kind of link: some boxes join only some of their GPUs by NVLink."""
    speeds_by_kind: dict[str, dict[Pair, float]] = {}
    for pair, cell in matrix.cells.items():
        if cell.gb_per_s is not None and pair[0] != pair[1]:
            kind = HOST if HOST in pair else link_kinds.get(pair, "")
            speeds_by_kind.setdefault(kind, {})[pair] = cell.gb_per_s
    # a link of another kind is slower by design
    for speeds in speeds_by_kind.values():
        if len(speeds) < _FEW_PAIRS:
            continue
        median = statistics.median(speeds.values())
        slow = [pair for pair, speed in speeds.items() if speed < median / _SLOW]
        if slow:
            pairs = ", ".join(f"{arrow(pair)} {speeds[pair]:.3g} GB/s" for pair in slow[:_MOST_SLOW_PAIRS])
            yield Advice(
                what=f"slow, the median of its kind is {median:.3g} GB/s: {pairs}",
                fix="check its link: width, speed, and its path in nvidia-smi topo -m",
                urgent=False,
            )


def _link_facts(link: Link) -> Iterator[str]:
    """Yield the facts of the link between two devices, as far as they are known."""
    if link.nvlink:
        yield "NVLink"
    if link.topology:
        yield link.topology
    if link.ancestor:
        yield f"below {link.ancestor}"
    if link.peer is not None:
        yield f"peer access {link.peer}"


def _gpu_facts(gpu: Gpu) -> Iterator[str]:
    """Yield the facts of the place and the state of a GPU, as far as they are known."""
    yield f"PCI {gpu.pci_bus_id}"
    if gpu.iommu_type is not None:
        yield f"IOMMU group {gpu.iommu_group} {gpu.iommu_type}"
    if "width" in gpu.link:
        yield f"link x{gpu.link['width']} {gpu.link.get('speed', '')}".rstrip()
    if gpu.numa_node is not None:
        yield f"NUMA node {gpu.numa_node}"
    if gpu.nvlinks is not None:
        yield f"{gpu.nvlinks} NVLinks up"
    active_controls = [f"{bridge}: {', '.join(controls)}" for bridge, controls in gpu.acs.items() if controls]
    if active_controls:
        yield f"ACS on at {'; '.join(active_controls)}"
    counters = [f"{name} {value}" for name, value in gpu.counters.items() if value]
    if counters:
        yield ", ".join(counters)
    if gpu.driver is not None:
        yield f"driver {gpu.driver}"


FINDERS = (Finder(name="host problems", phase=Phase.HOSTS, position=1, find=find_host_problems),)
