"""Drift: the same device, the same inputs, the same software, and other bits than on an earlier night.

It is the sign of failing hardware. The bits that count are those of the latest night on which the device did not drift
already, so that a device that went wrong stays red until somebody mends or accepts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from consistency.comparison.findings.causes import names
from consistency.comparison.history.store import History, Night, NightWorker, Table, digest_of
from consistency.comparison.result import Finding

_MOST_DETAILS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Good:
    """What the bits of a stage were, and since when nobody has seen them otherwise."""

    worker: NightWorker
    at: str


@dataclass(slots=True, kw_only=True)
class Earlier:
    """What is known of a device from the nights before, with the same inputs.

    Attributes
    ----------
    software, versions
        Of the latest night.
    good : dict of str to Good
        By stage, the latest night with the same software on which it had not drifted.
    """

    software: str
    versions: Mapping[str, object]
    good: dict[str, Good] = field(default_factory=dict)


def find_earlier(history: History, workers: Sequence[NightWorker]) -> dict[tuple[str, str], Earlier]:
    """Return what the nights before tell of each of tonight's workers, by device and road."""
    tonight = {(w.device, w.load_path): w for w in workers if w.status == "ok"}
    wanted = {key: set(worker.bits) for key, worker in tonight.items()}
    found: dict[tuple[str, str], Earlier] = {}
    for night in history.nights():
        for before in night.workers:
            key = (before.device, before.load_path)
            if not wanted.get(key) or before.status != "ok" or before.inputs != tonight[key].inputs:
                continue
            known = found.setdefault(key, Earlier(software=before.software, versions=night.versions))
            if before.software != tonight[key].software:
                continue
            for stage in wanted[key] & before.bits.keys() - set(before.drift):
                known.good[stage] = Good(worker=before, at=night.at)
                wanted[key].discard(stage)
        if not any(wanted.values()):
            break
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What the nights before say of tonight.

    Attributes
    ----------
    findings : tuple of Finding
        One per device and road that drifted, and a note where software changed instead.
    stages : dict
        Stages that drifted, by device and road.
    """

    findings: tuple[Finding, ...]
    stages: dict[tuple[str, str], tuple[str, ...]]


def find_drift(history: History, night: Night, tables: dict[str, bytes]) -> Drift:
    """Hold tonight's bits against those of the nights before.

    Parameters
    ----------
    history : History
        Without tonight.
    night : Night
    tables : dict
        Tonight's tables, as `history.night_of` returns them.
    """
    findings: list[Finding] = []
    stages: dict[tuple[str, str], tuple[str, ...]] = {}
    changed: dict[str, list[str]] = {}
    before = find_earlier(history, night.workers)
    for worker in night.workers:
        earlier = before.get((worker.device, worker.load_path))
        if earlier is None:
            continue
        if not earlier.good and earlier.software != worker.software:
            changed.setdefault(_versions(earlier.versions, night.versions), []).append(worker.name)
        others = {stage: good for stage, good in earlier.good.items() if good.worker.bits[stage] != worker.bits[stage]}
        table = msgspec.json.decode(tables[worker.table], type=Table) if others else {}
        differing = {
            stage: _differing(history.table(good.worker.table), table, stage) for stage, good in others.items()
        }
        differing = {stage: found for stage, found in differing.items() if found}
        if differing:
            since = max(others[stage].at for stage in differing)
            stages[worker.device, worker.load_path] = tuple(differing)
            findings.append(_finding(worker, since, differing, table))
    for versions, labels in changed.items():
        findings.append(
            Finding(
                kind="software",
                severity="note",
                message=(
                    f"{names(labels)}: the software or its settings are not those of the nights before{versions}; "
                    "bits are not held against theirs"
                ),
                workers=tuple(labels),
            )
        )
    return Drift(findings=tuple(findings), stages=stages)


def _differing(before: Table | None, now: Table, stage: str) -> list[str]:
    """Return the tensors of a stage whose bits differ; what only one of two nights looked at is no drift."""
    here = [name for name in now if name.startswith(f"{stage}::")]
    if before is None:  # the table is gone: that they differ is known, and not where
        return here
    return [name for name in here if name in before and before[name] != now[name]]


def _finding(worker: NightWorker, since: str, differing: Mapping[str, Sequence[str]], table: Table) -> Finding:
    tensors = [name for found in differing.values() for name in found]
    where = ", ".join(
        f"{len(found)} of {sum(name.startswith(f'{stage}::') for name in table)} {stage}"
        for stage, found in differing.items()
    )
    device = worker.name if worker.device.endswith(f"/{worker.name}") else f"{worker.name} ({worker.device})"
    return Finding(
        kind="drift",
        severity="error",
        message=(
            f"drift · {device} · other bits than on {since[:16].replace('T', ' ')} in {where} tensors: "
            "same inputs, same software"
        ),
        workers=(worker.name,),
        tensors=tuple(tensors),
        detail=tuple(tensors[:_MOST_DETAILS]),
        next="run it again: a device that gives other bits from night to night is failing; look at its ECC counters",
        state=digest_of([f"{name}={table[name]}" for name in tensors]),
    )


def _versions(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    texts = [f"{name} {before.get(name)} -> {now.get(name)}" for name in now if before.get(name) != now.get(name)]
    return f" ({', '.join(texts)})" if texts else ""
