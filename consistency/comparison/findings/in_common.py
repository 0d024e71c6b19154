"""What the odd ones among many devices have in common that the others lack: driver, board, kernel, host, rack.

A value is stated if all odd ones have it and fewer others than odd ones do, so that most devices with it are odd. It is
a count, not a cause: how many others have it, and of how many it is unknown, is part of the statement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from consistency.capture.wording import listed
from consistency.comparison.kinds import FindingKind
from consistency.comparison.result import Finding
from consistency.comparison.site_groups import SiteGroups
from consistency.comparison.workers import ComparedWorker

_HOST, _PCI = "host", "PCI address"
_PLACES = frozenset({_HOST, _PCI})
"""Facts that name a single device as much as its own name does, and so tell nothing of one odd device alone."""

_IDENTITY = frozenset({"device_uuid"})
_MOST_NAMED = 3
_MOST_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class InCommon:
    """A value that all odd ones have.

    Attributes
    ----------
    fact : str
        Name and value: `driver 580.95`.
    having, unknown, others : int
        How many others have it too, of how many it is not recorded, and how many there are.
    """

    fact: str
    having: int
    unknown: int
    others: int

    @property
    def line(self) -> str:
        """Return it with its counts."""
        known = self.others - self.unknown
        not_recorded = f"; not recorded of {self.unknown:,}" if self.unknown else ""
        return f"in common: {self.fact}, as {self.having or 'none'} of {known:,} others{not_recorded}"


Facts = Mapping[str, Mapping[str, str]]
"""Facts by name, by the name of the worker."""


def facts_of(workers: Iterable[ComparedWorker], groups: SiteGroups) -> dict[str, dict[str, str]]:
    """Return what is known of each worker that could tell it from others of its model; the site's groups first."""
    workers = list(workers)
    names = {name for worker in workers for name in _variables(worker) or ()}
    found: dict[str, dict[str, str]] = {}
    for worker in workers:
        site = dict(groups.of(worker.capture) or {})
        recorded = {name: value for name, value in _recorded(worker).items() if name not in site}
        variables = _variables(worker)
        if variables is not None:
            recorded |= {f"variable {name}": str(variables.get(name, "not set")) for name in sorted(names)}
        found.setdefault(worker.label, site | recorded)
    return found


def in_common(facts: Facts, odd: Sequence[str], others: Collection[str]) -> list[InCommon]:
    """Return the values that all odd ones have and (almost) none of the others, those that none has first."""
    found = []
    for name, value in facts[odd[0]].items():
        if any(facts[worker].get(name) != value for worker in odd):
            continue
        values = Counter(facts[worker].get(name) for worker in others)
        unknown = values.pop(None, 0)
        having = values.get(value, 0)
        # what differs from device to device anyway tells nothing of one of them
        tells = len(odd) > 1 or (name not in _PLACES and max(values.values(), default=0) > 1)
        if tells and having < len(odd) and unknown < len(others):
            found.append(InCommon(fact=f"{name} {value}", having=having, unknown=unknown, others=len(others)))
    return sorted(found, key=lambda one: one.having)


def clause(found: Sequence[InCommon], odd: Sequence[str]) -> str:
    """Return what follows in the sentence of a finding; empty where nothing is in common."""
    if not found:
        return ""
    who = "it has" if len(odd) == 1 else "all of them have"
    alone = [one for one in found if not one.having][:_MOST_NAMED]
    if not alone:
        first = found[0]
        too = "1 other has it too" if first.having == 1 else f"{first.having} others have it too"
        return f"; {who} {first.fact}, and {too}"
    known = " is known to have" if any(one.unknown for one in alone) else " has"
    return f"; {who} {listed([one.fact for one in alone])}, and no other{known}"


def lines(found: Sequence[InCommon]) -> tuple[str, ...]:
    """Return the lines of detail."""
    return tuple(one.line for one in found[:_MOST_LINES]) or ("no recorded fact sets them apart",)


def find_unknown_hosts(compared: Sequence[ComparedWorker], groups: SiteGroups) -> Iterable[Finding]:
    """Report a file of groups that names no host of the comparison."""
    if groups.hosts and compared and all(groups.of(worker.capture) is None for worker in compared):
        host = compared[0].capture.manifest.host
        yield Finding(
            kind=FindingKind.UNKNOWN_HOSTS,
            severity="note",
            message=f"--groups {groups.path} names none of the compared hosts, such as {host}: it was not used",
        )


def _variables(worker: ComparedWorker) -> Mapping[str, object] | None:
    """Return the environment variables that were recorded; those that are not in it were not set."""
    found = worker.info.environment.get("variables")
    return found if isinstance(found, dict) else None


def _recorded(worker: ComparedWorker) -> dict[str, str]:
    """Return the facts that a capture has of a worker; those that decide its program are equal within a model."""
    manifest, info = worker.capture.manifest, worker.info
    found: dict[str, object] = {_HOST: manifest.host, "driver": info.driver, _PCI: info.pci_bus_id}
    host = manifest.host_facts
    gpu = None if host is None else host.gpu(info.name.partition("@")[0])
    if gpu is not None:
        found |= {
            "driver": info.driver or gpu.driver,
            _PCI: info.pci_bus_id or gpu.pci_bus_id,
            "VBIOS": gpu.vbios,
            "board": gpu.board,
            "NUMA node": gpu.numa_node,
            "IOMMU type": gpu.iommu_type,
            "PCIe lanes": gpu.link.get("width"),
            "NVLinks": gpu.nvlinks,
        }
    if host is not None:
        found |= {"kernel": host.kernel, "IOMMU": host.iommu, "IOMMU options": " ".join(host.iommu_options) or "none"}
    found["consistency"] = manifest.tool
    for name, value in info.environment.items():
        if name not in _IDENTITY and isinstance(value, (str, int, float)):
            found.setdefault(name, value)
    return {name: str(value) for name, value in found.items() if value not in (None, "")}
