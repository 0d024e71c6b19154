"""What of a machine explains that copies between its devices go wrong, and what mends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from consistency.capture.names import HOST
from consistency.capture.wording import counted, listed
from consistency.devices.host.facts import Gpu, HostFacts
from consistency.devices.host.kernel_log import LOGGED
from consistency.devices.host.pci import REDIRECTS

Pair = tuple[str, str]
"""Source and destination of copies."""

_MOST_NAMES, _MOST_LOG = 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """What explains that copies go wrong, and what mends it."""

    text: str
    mend: str | None = None


def reasons(
    host_facts: HostFacts | None, pairs: Sequence[Pair], *, no_peer_access: Sequence[Pair] = ()
) -> list[Reason]:
    """Return what of a machine explains that copies of these pairs go wrong."""
    found: list[Reason] = []
    between = [pair for pair in pairs if HOST not in pair and pair[0] != pair[1]]
    gpus = [
        gpu
        for name in dict.fromkeys(name for pair in pairs for name in pair)
        if host_facts and (gpu := host_facts.gpu(name))
    ]
    if host_facts is not None and between:
        found += _addresses(host_facts, gpus)
        found += _redirected(gpus)
    if no_peer_access:
        found.append(
            Reason(text=f"there is no peer access {listed([arrow(pair) for pair in no_peer_access[:_MOST_NAMES]])}")
        )
    for gpu in gpus:
        if gpu.after:
            found.append(Reason(text=f"on {gpu.name} {_counters(gpu.after)} rose", mend=f"have {gpu.name} tested"))
    if host_facts is not None and host_facts.log:
        found.append(Reason(text=f"the kernel wrote {counted(len(host_facts.log), 'line')} of {LOGGED} since boot"))
    return found


def _addresses(host_facts: HostFacts, gpus: Sequence[Gpu]) -> Iterator[Reason]:
    translated = [gpu for gpu in gpus if gpu.is_translated]
    if translated:
        kinds = listed(sorted({gpu.iommu_type or "" for gpu in translated}))
        given = " ".join(host_facts.iommu_options) or "no iommu=pt"
        yield Reason(
            text=f"the IOMMU translates (group type {kinds}; {given})",
            mend="boot with iommu=pt on the kernel's command line, then: consistency doctor",
        )


def _redirected(gpus: Sequence[Gpu]) -> Iterator[Reason]:
    bridges = sorted({bridge for gpu in gpus for bridge, on in gpu.acs.items() if REDIRECTS & set(on)})
    if bridges:
        yield Reason(
            text=f"ACS sends peer traffic up to the root at {listed(bridges[:_MOST_NAMES])}",
            mend="switch ACS off on the bridges above the GPUs (in the firmware, or with setpci), then: "
            "consistency doctor",
        )


def about(host_facts: HostFacts | None) -> Iterator[str]:
    """Say what else is known of the machine, and what could not be read."""
    if host_facts is None:
        return
    if host_facts.boot_id is not None:
        up = "" if host_facts.uptime_s is None else f", up {host_facts.uptime_s / 3600:.1f} h"
        yield (
            f"boot {host_facts.boot_id}{up}: a reboot may hide it; keep this capture and compare it with one from after"
        )
    yield from (f"kernel: {line}" for line in host_facts.log[-_MOST_LOG:])
    if host_facts.unread:
        yield "not known: " + "; ".join(f"{name} ({why})" for name, why in host_facts.unread.items())


def _counters(risen: Mapping[str, int]) -> str:
    return listed([f"{name} (now {value})" for name, value in risen.items()])


def arrow(pair: Pair) -> str:
    """Return a pair for people: `cuda:0→cuda:1`, `within cuda:1`."""
    return f"within {'the host' if pair[0] == HOST else pair[0]}" if pair[0] == pair[1] else f"{pair[0]}→{pair[1]}"
