"""Add a run to a history and find drift: results that differ bitwise from an earlier run, inputs and software equal.

Drift is a sign of failing hardware. A device is compared with the latest run in which it had not already drifted, so
it stays an error until somebody fixes the device or accepts the finding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from consistency.capture.folder import Capture
from consistency.capture.wording import some
from consistency.case.stages import MOVES_WEIGHTS
from consistency.comparison.by_worker import verdicts
from consistency.comparison.findings.collect import AS_DEPLOYED
from consistency.comparison.history.baseline import Baseline, apply
from consistency.comparison.history.store import History, RunRecord, Table, WorkerRecord, digest_of, record_of
from consistency.comparison.result import Comparison, Finding, with_findings

DRIFT = "drift"
"""Kind of the finding that a device's bits are not those of an earlier run."""

_MOST_DETAILS = 5


@dataclass(slots=True, kw_only=True)
class _Earlier:
    """What earlier runs recorded of a device, with the same inputs; `software` and `versions` are the latest run's.

    `good` has, by stage, the latest record with the same software in which it had not drifted, and its time.
    """

    software: str
    versions: Mapping[str, object]
    good: dict[str, tuple[WorkerRecord, str]] = field(default_factory=dict)


def add_run(
    history: History,
    captures: Sequence[Capture],
    comparison: Comparison,
    baseline: Baseline | None,
    *,
    report: str = "",
) -> Comparison:
    """Add a run to a history; return its comparison with a finding for each device that has drifted.

    `report` is the folder that its report will be in.
    """
    record, tables = record_of(captures, comparison)
    record = msgspec.structs.replace(record, report=report)
    comparison, record = judge_drift(history, record, tables, comparison, baseline)
    history.append(record, tables)
    return comparison


def judge_drift(
    history: History, record: RunRecord, tables: dict[str, bytes], comparison: Comparison, baseline: Baseline | None
) -> tuple[Comparison, RunRecord]:
    """Return a comparison with a finding for each device that has drifted, and the record of that.

    An accepted drift is not recorded as one: the device is compared with this run from now on.
    """
    pinned = "deployed" not in comparison.profile
    findings, stages = find_drift(history, record, tables, pinned=pinned)
    damage = [
        Finding(kind="damaged-night", severity="warning", message=f"history: {text}: left out")
        for text in history.damage
    ]
    comparison = with_findings(comparison, [*findings, *comparison.findings, *damage])
    if baseline is not None:
        comparison = apply(baseline, comparison)
    errors = [f for f in comparison.findings if f.severity == "error"]
    drifted = {label for f in errors if f.kind == DRIFT for label in f.workers}
    found = verdicts(comparison)
    workers = tuple(
        msgspec.structs.replace(
            w,
            verdict=found.get(w.name, ""),
            drift=stages.get((w.device, w.load_path), ()) if w.name in drifted else (),
        )
        for w in record.workers
    )
    messages = tuple(f.message for f in errors)
    return comparison, msgspec.structs.replace(record, workers=workers, verdict=comparison.verdict, findings=messages)


def find_drift(
    history: History, run: RunRecord, tables: dict[str, bytes], *, pinned: bool = True
) -> tuple[list[Finding], dict[tuple[str, str], tuple[str, ...]]]:
    """Return the devices that drifted, with a note where software changed instead; and their stages that drifted.

    Where the settings are not `pinned`, what was computed may change: a note.
    """
    findings: list[Finding] = []
    stages: dict[tuple[str, str], tuple[str, ...]] = {}
    changed: dict[str, list[str]] = {}
    known = _find_earlier(history, run)
    for worker in run.workers:
        earlier = known.get((worker.device, worker.load_path))
        if earlier is None:
            continue
        if not earlier.good and earlier.software != worker.software:
            changed.setdefault(_versions(earlier.versions, run.versions), []).append(worker.name)
        others = {stage: good for stage, good in earlier.good.items() if good[0].bits[stage] != worker.bits[stage]}
        table = msgspec.json.decode(tables[worker.table], type=Table) if others else {}
        differing = {
            stage: found
            for stage, (before, _) in others.items()
            if (found := _differing(history.table(before.table), table, stage))
        }
        if differing:
            stages[worker.device, worker.load_path] = tuple(differing)
            drift = _finding(worker, max(others[stage][1] for stage in differing), differing, table)
            if not pinned and not any(stage in MOVES_WEIGHTS for stage in differing):
                message = drift.message + AS_DEPLOYED
                drift = msgspec.structs.replace(drift, severity="note", message=message, next=None)
            findings.append(drift)
    for versions, labels in changed.items():
        message = f"{some(labels)}: software or settings changed since the previous run{versions}; bits not compared"
        findings.append(Finding(kind="software", severity="note", message=message, workers=tuple(labels)))
    return findings, stages


def _find_earlier(history: History, now: RunRecord) -> dict[tuple[str, str], _Earlier]:
    """Return what the earlier runs recorded of each worker, by device and load path."""
    current = {(w.device, w.load_path): w for w in now.workers if w.status == "ok"}
    wanted = {key: set(worker.bits) for key, worker in current.items()}
    found: dict[tuple[str, str], _Earlier] = {}
    for run in history.earlier():
        for before in run.workers:
            key = (before.device, before.load_path)
            if not wanted.get(key) or before.status != "ok" or before.inputs != current[key].inputs:
                continue
            if not _is_same_case(run, before, now, current[key]):
                continue
            known = found.setdefault(key, _Earlier(software=before.software, versions=run.versions))
            if before.software != current[key].software:
                continue
            for stage in wanted[key] & before.bits.keys() - set(before.drift):
                known.good[stage] = (before, run.at)
                wanted[key].discard(stage)
        if not any(wanted.values()):
            break
    return found


def _is_same_case(run: RunRecord, before: WorkerRecord, now: RunRecord, worker: WorkerRecord) -> bool:
    """Return whether two records may be compared: a case of a suite by its name, in a suite or in a run of its own.

    A run of one case is compared with any other: with the same inputs only its name can differ.
    """
    if not before.case and not worker.case:
        return True
    return (before.case or run.case) == (worker.case or now.case)


def _differing(before: Table | None, now: Table, stage: str) -> list[str]:
    """Return the tensors of a stage whose bits differ; a tensor that only one of two runs checked is no drift."""
    here = [name for name in now if name.startswith(f"{stage}::")]
    if before is None:  # without the table it is known that they differ, but not where
        return here
    return [name for name in here if name in before and before[name] != now[name]]


def _finding(worker: WorkerRecord, since: str, differing: Mapping[str, Sequence[str]], table: Table) -> Finding:
    tensors = [name for found in differing.values() for name in found]
    where = ", ".join(
        f"{len(found)} of {sum(name.startswith(f'{stage}::') for name in table)} {stage}"
        for stage, found in differing.items()
    )
    device = worker.name if worker.device.endswith(f"/{worker.name}") else f"{worker.name} ({worker.device})"
    return Finding(
        kind=DRIFT,
        severity="error",
        message=(
            f"drift · {device} · {where} tensors differ bitwise from the run of {since[:16].replace('T', ' ')}: "
            "same inputs, same software"
        ),
        general=f"drift · {device} · {', '.join(differing)} tensors differ bitwise from an earlier run: same inputs, "
        "same software",
        workers=(worker.name,),
        tensors=tuple(tensors),
        detail=tuple(tensors[:_MOST_DETAILS]),
        next="run again: a device whose results change between runs is failing; check its ECC error counters",
        state=digest_of([f"{name}={table[name]}" for name in tensors]),
    )


def _versions(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    texts = [f"{name} {before.get(name)} -> {now.get(name)}" for name in now if before.get(name) != now.get(name)]
    return f" ({', '.join(texts)})" if texts else ""
