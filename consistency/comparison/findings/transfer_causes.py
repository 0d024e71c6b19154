"""Host facts -> why copies between its devices may be wrong, and the fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """A likely cause of wrong copies, and its fix."""

    text: str
    fix: str | None = None


def reasons(
    host_facts: HostFacts | None, pairs: Sequence[Pair], *, no_peer_access: Sequence[Pair] = ()
) -> list[Reason]:
    """Return what the facts of a host can explain of wrong copies between these pairs."""
    found: list[Reason] = []
    names = dict.fromkeys(name for pair in pairs for name in pair)
    gpus = [gpu for name in names if host_facts and (gpu := host_facts.gpu(name))]
    if host_facts is not None and any(HOST not in pair and pair[0] != pair[1] for pair in pairs):
        found += [*_addresses(host_facts, gpus), *_redirected(gpus)]
    if no_peer_access:
        found.append(Reason(text=f"no peer access {listed([arrow(pair) for pair in no_peer_access[:_MOST_NAMES]])}"))
    for gpu in gpus:
        if gpu.after:
            risen = listed([f"{name} (now {value})" for name, value in gpu.after.items()])
            found.append(Reason(text=f"{risen} rose on {gpu.name}", fix=f"have {gpu.name} tested"))
    if host_facts is not None and host_facts.log:
        found.append(Reason(text=f"the kernel logged {counted(len(host_facts.log), 'line')} of {LOGGED} since boot"))
    return found


def _addresses(host_facts: HostFacts, gpus: Sequence[Gpu]) -> Iterator[Reason]:
    translated = [gpu for gpu in gpus if gpu.is_translated]
    if translated:
        kinds = listed(sorted({gpu.iommu_type or "" for gpu in translated}))
        given = " ".join(host_facts.iommu_options) or "no iommu=pt"
        yield Reason(
            text=f"the IOMMU translates (group type {kinds}; {given})",
            fix="boot with iommu=pt on the kernel's command line, then: consistency doctor",
        )


def _redirected(gpus: Sequence[Gpu]) -> Iterator[Reason]:
    bridges = sorted({bridge for gpu in gpus for bridge, on in gpu.acs.items() if REDIRECTS & set(on)})
    if bridges:
        yield Reason(
            text=f"ACS redirects peer traffic through the root complex at {listed(bridges[:_MOST_NAMES])}",
            fix="disable ACS on the bridges above the GPUs (in the firmware, or with setpci), then: consistency doctor",
        )


def about(host_facts: HostFacts | None) -> Iterator[str]:
    """Yield what else is known of a host, and what could not be read."""
    if host_facts is None:
        return
    if host_facts.boot_id is not None:
        yield f"{boot(host_facts)}: a reboot may hide the fault; keep this capture and compare it with a later one"
    yield from (f"kernel: {line}" for line in host_facts.log[-_MOST_LOG:])
    if host_facts.unread:
        yield "unknown: " + "; ".join(f"{name} ({why})" for name, why in host_facts.unread.items())


def boot(host_facts: HostFacts) -> str:
    """Return the boot of a host and its uptime: `boot 5f2c, up 3.1 h`."""
    up = "" if host_facts.uptime_s is None else f", up {host_facts.uptime_s / 3600:.1f} h"
    return f"boot {host_facts.boot_id or 'unknown'}{up}"


def arrow(pair: Pair) -> str:
    """Return a pair for people: `cuda:0→cuda:1`, `within cuda:1`."""
    return f"within {'the host' if pair[0] == HOST else pair[0]}" if pair[0] == pair[1] else f"{pair[0]}→{pair[1]}"
