"""Add a run to a history and find drift: results that differ bitwise from an earlier run, inputs and software equal.

Drift is a sign of failing hardware. A device is compared with the latest run in which it had not already drifted, so
it stays an error until somebody fixes the device or accepts the finding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from consistency.capture.folder import Capture
from consistency.capture.reader import brief, read_capture
from consistency.capture.records import TensorRecord
from consistency.capture.wording import some, when
from consistency.case.stages import MOVES_WEIGHTS, stage_order
from consistency.comparison import kinds
from consistency.comparison.by_worker import verdicts
from consistency.comparison.findings.repeats import AS_DEPLOYED
from consistency.comparison.outcomes import Outcome
from consistency.comparison.result import Comparison, Finding, tensor_name, with_findings, with_unwritten
from consistency.errors import CaptureError
from consistency.extras.operations.history.baseline import Baseline, apply
from consistency.extras.operations.history.gone import find_gone
from consistency.extras.operations.history.recording import record_of
from consistency.extras.operations.history.records import (
    MOST_APART,
    RunRecord,
    RunWorkers,
    Table,
    WorkerRecord,
    digest_of,
)
from consistency.extras.operations.history.store import History

_MOST_DETAILS = 5


@dataclass(slots=True, kw_only=True)
class _Earlier:
    """What earlier runs recorded of a device, with the same inputs; `latest` and `versions` are of the latest run.

    `good` has, by stage, the latest record with the same software in which it had not drifted, and its time; `reports`
    the folders of their reports, by time.
    """

    latest: WorkerRecord
    versions: Mapping[str, object]
    good: dict[str, tuple[WorkerRecord, str]] = field(default_factory=dict)
    reports: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drift:
    """How a worker drifted: the name of its table, the run that it is compared with, and tensors by stage.

    `report` is the folder of that run's report, and `back` the latest earlier run with the bits of now.
    """

    table: str
    since: str
    differing: tuple[tuple[str, tuple[str, ...]], ...]
    report: str = ""
    back: str = ""


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
    try:
        pinned = all_pinned(captures)
        judged, record = judge_drift(history, record, tables, comparison, baseline, pinned=pinned)
    except CaptureError as error:
        return unjudged(comparison, baseline, error)
    comparison = judged
    try:
        history.append(record, tables)
    except CaptureError as error:
        return with_unwritten(comparison, [f"this run is not in the history: {brief(error)}"])
    return comparison


def unjudged(comparison: Comparison, baseline: Baseline | None, error: CaptureError) -> Comparison:
    """Return a comparison that says why it is not compared with earlier runs."""
    comparison = comparison if baseline is None else apply(baseline, comparison)
    return with_unwritten(comparison, [f"not compared with earlier runs: {brief(error)}"])


def all_pinned(captures: Sequence[Capture]) -> bool:
    """Return whether every capture was made with all settings fixed: without, equal bits are promised nowhere."""
    return all(capture.manifest.case.is_pinned for capture in captures)


def judge_drift(
    history: History,
    record: RunRecord,
    tables: dict[str, bytes],
    comparison: Comparison,
    baseline: Baseline | None,
    *,
    pinned: bool,
) -> tuple[Comparison, RunRecord]:
    """Return a comparison with a finding for each device that has drifted, and the record of that.

    An accepted drift is not recorded as one: the device is compared with this run from now on. Nor is a device that is
    gone; where that is not accepted, a part was not checked.
    """
    findings, stages = find_drift(history, record, tables, comparison, pinned=pinned)
    losses, gone = find_gone(history, record)
    damage = [
        Finding(kind=kinds.DAMAGED_RUN, severity="warning", message=f"history: {text}: left out")
        for text in history.damage
    ]
    comparison = with_findings(comparison, [*losses, *findings, *comparison.findings, *damage])
    if baseline is not None:
        comparison = apply(baseline, comparison)
    errors = [f for f in comparison.findings if f.severity == "error"]
    drifted = {label for f in errors if f.kind == kinds.DRIFT for label in f.workers}
    if any(f.kind == kinds.GONE_DEVICE for f in errors):
        comparison = msgspec.structs.replace(comparison, verdict="incomplete")
    else:
        gone = ()
    found = verdicts(comparison.workers, comparison.findings)
    workers = RunWorkers.of(
        msgspec.structs.replace(
            w,
            verdict=found.get(w.name, ""),
            drift=stages.get((w.device, w.load_path), ()) if w.name in drifted else (),
        )
        for w in record.workers
    )
    messages = tuple(f.message for f in errors)
    return comparison, msgspec.structs.replace(
        record, workers=workers, verdict=comparison.verdict, findings=messages, gone=gone
    )


def find_drift(
    history: History,
    run: RunRecord,
    tables: dict[str, bytes],
    comparison: Comparison | None = None,
    *,
    pinned: bool = True,
) -> tuple[list[Finding], dict[tuple[str, str], tuple[str, ...]]]:
    """Return the devices that drifted, with a note where software changed instead; and their stages that drifted.

    Where the settings are not `pinned`, what was computed may change: a note.
    """
    stages: dict[tuple[str, str], tuple[str, ...]] = {}
    changed: dict[str, list[str]] = {}
    drifted: dict[object, tuple[_Drift, list[WorkerRecord]]] = {}
    fresh: list[WorkerRecord] = []
    known = _find_earlier(history, run)
    tensors = _Tensors(history, tables)
    is_fleet = len(run.workers.devices) > MOST_APART
    for worker in run.workers:
        earlier = known.get((worker.device, worker.load_path))
        if earlier is None:
            fresh.append(worker)
            continue
        if not earlier.good and earlier.latest.software != worker.software:
            changed.setdefault(_changes(earlier, run, worker), []).append(worker.name)
        differing = {
            stage: found
            for stage, (before, _) in sorted(earlier.good.items(), key=lambda good: stage_order(good[0]))
            if before.bits[stage] != worker.bits[stage]
            and (found := tensors.differing(before.table, worker.table, stage))
        }
        if differing:
            stages[worker.device, worker.load_path] = tuple(differing)
            since = max(earlier.good[stage][1] for stage in differing)
            back = _same_bits(history, run, worker, tuple(differing))
            drift = _Drift(
                table=worker.table,
                since=since,
                differing=tuple(differing.items()),
                report=earlier.reports[since],
                back=back,
            )
            drifted.setdefault(drift if is_fleet else worker.key, (drift, []))[1].append(worker)
    findings = []
    compared = [known[key] for worker in run.workers if (key := (worker.device, worker.load_path)) in known]
    is_common = len({device for device, _ in stages}) > 1 and len(stages) == sum(bool(one.good) for one in compared)
    for drift, workers in drifted.values():
        names = [name for _, found in drift.differing for name in found]
        size = "" if comparison is None else _magnitude(comparison, workers[0], names, drift.report)
        finding = _finding(workers, drift, tensors.now(drift.table), size, is_common=is_common)
        if not pinned and not any(stage in MOVES_WEIGHTS for stage, _ in drift.differing):
            message = finding.message + AS_DEPLOYED
            finding = msgspec.structs.replace(finding, severity="note", message=message, next=None)
        findings.append(finding)
    if fresh and (since := _with_other_inputs(history, run, fresh)):
        renewed = tuple(worker.name for worker in fresh)
        what = "base, adapter, config, factory, text, dtype or level"
        message = f"{some(renewed)}: other inputs than in the run of {when(since)} ({what}); bits not compared"
        findings.append(Finding(kind=kinds.INPUTS, severity="note", message=message, workers=renewed))
    for text, labels in changed.items():
        message = f"{some(labels)}: software or settings changed since the previous run{text}; bits not compared"
        findings.append(Finding(kind=kinds.SOFTWARE, severity="note", message=message, workers=tuple(labels)))
    return findings, stages


def compared_with(history: History, run: RunRecord) -> set[str]:
    """Return the times of the runs that the workers of a run are compared with."""
    known = _find_earlier(history, run).values()
    return {at for earlier in known for _, at in earlier.good.values()}


def _find_earlier(history: History, now: RunRecord) -> dict[tuple[str, str], _Earlier]:
    """Return what the earlier runs recorded of each worker, by device and load path."""
    current = {(w.device, w.load_path): w for w in now.workers if w.status == "ok"}
    wanted = {key: set(worker.bits) for key, worker in current.items()}
    found: dict[tuple[str, str], _Earlier] = {}
    new = {device for device, _ in current}
    known: set[str] = set()
    inputs, software = ({getattr(w, name) for w in current.values()} for name in ("inputs", "software"))
    for run in history.earlier() if new else ():
        # what ran with other software only tells that it has changed since the latest run
        first = run.workers.select(new, inputs=inputs) if new else ()
        others = run.workers.select(known, inputs=inputs, software=software) if known else ()
        for before in (*first, *others):
            key = (before.device, before.load_path)
            if not wanted.get(key) or before.status != "ok" or before.inputs != current[key].inputs:
                continue
            if not _is_same_case(run, before, now, current[key]):
                continue
            earlier = found.setdefault(key, _Earlier(latest=before, versions=run.versions))
            if before.software != current[key].software:
                continue
            for stage in wanted[key] & before.bits.keys() - set(before.drift):
                earlier.good[stage] = (before, run.at)
                earlier.reports[run.at] = run.report
                wanted[key].discard(stage)
        new = {device for (device, _), stages in wanted.items() if stages and (device, _) not in found}
        known = {device for (device, _), stages in wanted.items() if stages} - new
        if not new and not known:
            break
    return found


def _with_other_inputs(history: History, now: RunRecord, workers: Sequence[WorkerRecord]) -> str:
    """Return the time of the latest run of the same case on one of these devices, or an empty text."""
    wanted = {(worker.device, worker.case or now.case) for worker in workers}
    for run in history.earlier():
        before = run.workers.select({device for device, _ in wanted})
        if any((one.device, one.case or run.case) in wanted and one.status == "ok" for one in before):
            return run.at
    return ""


def _same_bits(history: History, now: RunRecord, worker: WorkerRecord, stages: Sequence[str]) -> str:
    """Return the time of the latest earlier run in which a worker had these bits without a drift, or an empty text."""
    for run in history.earlier():
        for before in run.workers.select({worker.device}, inputs={worker.inputs}, software={worker.software}):
            is_same = before.load_path == worker.load_path and _is_same_case(run, before, now, worker)
            if not is_same or {*stages} & {*before.drift}:
                continue
            if all(before.bits.get(stage) == worker.bits[stage] for stage in stages):
                return run.at
    return ""


def _is_same_case(run: RunRecord, before: WorkerRecord, now: RunRecord, worker: WorkerRecord) -> bool:
    """Return whether two records may be compared: a case of a suite by its name, in a suite or in a run of its own.

    A run of one case is compared with any other: with the same inputs only its name can differ.
    """
    if not before.case and not worker.case:
        return True
    return (before.case or run.case) == (worker.case or now.case)


class _Tensors:
    """The tables of a run and of earlier ones, each read once: thousands of workers share a few."""

    def __init__(self, history: History, tables: Mapping[str, bytes]) -> None:
        self._before = functools.cache(history.table)
        self.now = functools.cache(lambda name: msgspec.json.decode(tables[name], type=Table))
        self.differing = functools.cache(self._differing)

    def _differing(self, before: str, now: str, stage: str) -> tuple[str, ...]:
        """Return the tensors of a stage whose bits differ; a tensor that only one of two runs checked is no drift."""
        earlier, table = self._before(before), self.now(now)
        here = tuple(name for name in table if name.startswith(f"{stage}::"))
        if earlier is None:  # without the table it is known that they differ, but not where
            return here
        return tuple(name for name in here if name in earlier and earlier[name] != table[name])


_ALONE = "run again: a device whose results change between runs is failing; check its ECC error counters"
_TOGETHER = (
    "look for what all devices have in common: code that the model imports, a file that no stage reads, a library, the "
    "host's memory"
)


def _finding(
    workers: Sequence[WorkerRecord], drift: _Drift, table: Table, size: str, *, is_common: bool = False
) -> Finding:
    """Return the finding of workers that drifted alike, `size` of which is how far; `is_common`: all did at once."""
    tensors = [name for _, found in drift.differing for name in found]
    where = ", ".join(
        f"{len(found)} of {sum(name.startswith(f'{stage}::') for name in table)} {stage}"
        for stage, found in drift.differing
    )
    return Finding(
        kind=kinds.DRIFT,
        severity="error",
        message=(
            f"drift · {_devices(workers)} · {where} tensors differ bitwise from the run of "
            f"{when(drift.since)}: same inputs, same software"
            + (f"; they are those of the run of {when(drift.back)}" if drift.back else "")
            + ("; every device that is compared drifted, so the cause is common to them" if is_common else "")
        ),
        general=f"drift · {_devices(workers)} · {', '.join(stage for stage, _ in drift.differing)} tensors differ "
        "bitwise from an earlier run: same inputs, same software",
        workers=tuple(worker.name for worker in workers),
        tensors=tuple(tensors),
        detail=(
            *tensors[:_MOST_DETAILS],
            *([size] if size else []),
            *([f"the earlier run's report: {drift.report}"] if drift.report else []),
        ),
        next=_TOGETHER if is_common else _ALONE,
        state=digest_of(sorted(f"{name}={table[name]}" for name in tensors)),
    )


def _devices(workers: Sequence[WorkerRecord]) -> str:
    if len(workers) > 1:
        return some([worker.name for worker in workers])
    (worker,) = workers
    return worker.name if worker.device.endswith(f"/{worker.name}") else f"{worker.name} ({worker.device})"


def _changes(earlier: _Earlier, run: RunRecord, worker: WorkerRecord) -> str:
    """Return what is known of a change of software."""
    before, now = earlier.versions, run.versions
    texts = [f"{name} {before.get(name)} -> {now.get(name)}" for name in now if before.get(name) != now.get(name)]
    if earlier.latest.driver and worker.driver and earlier.latest.driver != worker.driver:
        texts.append(f"driver {earlier.latest.driver} -> {worker.driver}")
    return f" ({', '.join(texts)})" if texts else ""


def _magnitude(comparison: Comparison, worker: WorkerRecord, tensors: Sequence[str], report: str) -> str:
    """Return a sentence about the drifted tensor that is furthest from the exact values; empty where none is known.

    `report` is the folder of the earlier run's report. A capture has errors against the exact values and digests, not
    the tensors: two results that are off by a and by b from the same exact values are at most a + b apart.
    """
    before = _errors(worker, set(tensors), report)
    known = [
        (row, name)
        for one in comparison.tensors
        if one.load_path == worker.load_path and (name := one.name) in before
        for row in one.outcomes
        if worker.name in row.workers and row.max_abs is not None and row.reference not in (None, "file")
    ]
    if not known:
        return ""
    row, name = max(known, key=_share)
    here, there = float(row.max_abs or 0), before[name]
    allowed = f", allowed {float(row.allowed):.2g}" if row.allowed else ""
    return (
        f"{name}: off from the exact values by at most {here:.2g} in this run{allowed}, and {there:.2g} in the earlier "
        f"one, so by at most {here + there:.2g} between the two"
    )


def _share(found: tuple[Outcome, str]) -> float:
    row, _ = found
    return float(row.max_abs or 0) if row.ratio is None else float(row.ratio)


def _errors(worker: WorkerRecord, tensors: set[str], report: str) -> dict[str, float]:
    """Return the largest error of each of these tensors in the earlier run, where that was measured."""
    if not report or not Path(report).is_dir():
        return {}
    try:
        capture = read_capture(Path(report))
    except CaptureError:
        return {}
    of_worker = (one for one in capture.workers if one.info.name == worker.name)
    records = (record for one in of_worker for part in one.parts for record in part)
    return {
        name: float(record.measure.max_abs)
        for record in records
        if record.measure is not None and _load_path(record, worker) and (name := tensor_name(*record.key)) in tensors
    }


def _load_path(record: TensorRecord, worker: WorkerRecord) -> bool:
    return record.load_path in ("", worker.load_path)
