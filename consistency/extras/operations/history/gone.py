"""Find accelerators that a host had in an earlier run and has no longer.

`auto` takes what a host shows, so a card that falls off the bus, or all of them with their driver, would leave a
smaller run that agrees with itself. A device that was not named is no loss: only runs of `auto` are compared, with
the same variables that show a part of the devices. Where a host has another card instead, its hardware was changed, or
a scheduler gave out others: `changes` lists that, and it is no error.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from consistency.capture.wording import some, when
from consistency.comparison import kinds
from consistency.comparison.result import Finding
from consistency.extras.operations.history.records import GoneDevice, RunRecord, digest_of
from consistency.extras.operations.history.store import History


def find_gone(history: History, run: RunRecord) -> tuple[list[Finding], tuple[GoneDevice, ...]]:
    """Return a finding for each host with fewer accelerators than before, and all of these devices."""
    gone_by_host = _gone_by_host(history, run)
    findings = [_finding(host, devices) for host, devices in gone_by_host.items()]
    return findings, tuple(itertools.chain(*gone_by_host.values()))


def _gone_by_host(history: History, run: RunRecord) -> dict[str, list[GoneDevice]]:
    """Return the accelerators of each host that its latest earlier run had, or missed too, and this run has not.

    Only a run in which the same variables showed a part of the host's devices counts.
    """
    # of each host, the latest run with the same variables decides, so a host is looked for until one is met
    pending = dict(run.auto)
    if not pending:
        return {}
    accelerators = _accelerators(run)
    gone: dict[str, list[GoneDevice]] = {}
    for earlier in history.earlier():
        hosts = [host for host, masks in pending.items() if earlier.auto.get(host) == masks]
        earlier_accelerators = _accelerators(earlier) if hosts else {}
        for host in hosts:
            del pending[host]
            # a device stays gone until it is back or its loss is accepted, however many runs lack it
            expected = {device.device: device for device in earlier.gone if device.host == host}
            expected |= earlier_accelerators.get(host, {})
            present = accelerators.get(host, {}).keys()
            if present < expected.keys():  # with a device that is new, the hardware was changed
                gone[host] = [device for identity, device in expected.items() if identity not in present]
        if not pending:
            break
    return gone


def _accelerators(run: RunRecord) -> Mapping[str, dict[str, GoneDevice]]:
    """Return the accelerators of a run by host and identity, each as it will be recorded if it is gone later."""
    accelerators: dict[str, dict[str, GoneDevice]] = {}
    for worker in run.workers:
        # a name with a kernel variant, `cuda:0@tf32`, is of the same device
        name = worker.name.partition("@")[0]
        if name.rpartition(":")[2] != "cpu":  # `cpu`, or `host:cpu` where several captures have one
            host, identity = worker.host or run.host, worker.device.partition("@")[0]
            device = GoneDevice(device=identity, name=name, host=host, last=run.at)
            accelerators.setdefault(host, {})[identity] = device
    return accelerators


def _finding(host: str, devices: Sequence[GoneDevice]) -> Finding:
    """Return the finding that a host no longer has some devices."""
    last = max(device.last for device in devices)
    names = [_full_name(device) for device in sorted(devices, key=lambda device: device.name)]
    return Finding(
        kind=kinds.GONE_DEVICE,
        severity="error",
        message=(f"{host} no longer has {some(names)}, which the run of {when(last)} had: not checked"),
        general=f"{host} no longer has {some(names)}",
        detail=tuple(names),
        next="check it, its driver and the kernel's log; where it was removed on purpose: consistency baseline accept",
        state=digest_of(sorted(device.device for device in devices)),
    )


def _full_name(device: GoneDevice) -> str:
    """Return the name of a device, with its identity where that says more than host and name."""
    return device.name if device.device.endswith(f"/{device.name}") else f"{device.name} ({device.device})"
