"""Find accelerators that a host had in an earlier run and has no longer.

`auto` takes what a host shows, so a card that falls off the bus, or all of them with their driver, would leave a
smaller run that agrees with itself. A device that was not named is no loss: only runs of `auto` are compared, with
the same variables that show a part of the devices. Where a host has another card instead, its hardware was changed, or
a scheduler gave out others: `changes` lists that, and it is no error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from consistency.capture.wording import some, when
from consistency.comparison import kinds
from consistency.comparison.result import Finding
from consistency.extras.operations.history.records import GoneDevice, RunRecord, WorkerRecord, digest_of
from consistency.extras.operations.history.store import History


def find_gone(history: History, run: RunRecord) -> tuple[list[Finding], tuple[GoneDevice, ...]]:
    """Return a finding for each host with fewer accelerators than before, and all of these devices."""
    lost = _lost(history, run)
    return [_finding(host, devices) for host, devices in lost.items()], tuple(itertools.chain(*lost.values()))


def _lost(history: History, run: RunRecord) -> dict[str, list[GoneDevice]]:
    """Return what each host lacks that the latest run of the same variables had, or lacked too."""
    now = _accelerators(run, run.workers)
    pending = dict(run.auto)
    found: dict[str, list[GoneDevice]] = {}
    for earlier in history.earlier() if pending else ():
        hosts = [host for host, masks in pending.items() if earlier.auto.get(host) == masks]
        before = _accelerators(earlier, earlier.workers) if hosts else {}
        for host in hosts:
            del pending[host]
            known = {one.device: one for one in earlier.gone if one.host == host} | before.get(host, {})
            here = now.get(host, {}).keys()
            if here < known.keys():
                found[host] = [one for device, one in known.items() if device not in here]
        if not pending:
            break
    return found


def _accelerators(run: RunRecord, workers: Iterable[WorkerRecord]) -> Mapping[str, dict[str, GoneDevice]]:
    """Return the accelerators of a run by host and identity."""
    found: dict[str, dict[str, GoneDevice]] = {}
    for worker in workers:
        name = worker.name.partition("@")[0]
        if name.rpartition(":")[2] != "cpu":  # `cpu`, or `host:cpu` where several captures have one
            host, device = worker.host or run.host, worker.device.partition("@")[0]
            found.setdefault(host, {})[device] = GoneDevice(device=device, name=name, host=host, last=run.at)
    return found


def _finding(host: str, devices: Sequence[GoneDevice]) -> Finding:
    last = max(one.last for one in devices)
    names = [
        one.name if one.device.endswith(f"/{one.name}") else f"{one.name} ({one.device})"
        for one in sorted(devices, key=lambda one: one.name)
    ]
    return Finding(
        kind=kinds.GONE_DEVICE,
        severity="error",
        message=(f"{host} no longer has {some(names)}, which the run of {when(last)} had: not checked"),
        general=f"{host} no longer has {some(names)}",
        detail=tuple(names),
        next="check it, its driver and the kernel's log; where it was removed on purpose: consistency baseline accept",
        state=digest_of(sorted(one.device for one in devices)),
    )
