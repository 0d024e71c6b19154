"""Add a run to a history and find drift: results that differ bitwise from an earlier run, inputs and software equal.

Drift is a sign of failing hardware. A device is compared with the latest run in which it had not already drifted, so
it stays an error until somebody fixes the device or accepts the finding.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from consistency.capture.folder import Capture
from consistency.capture.reader import brief, read_capture
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


_WorkerPlace = tuple[str, str]
"""Device and load path of a worker: what finds it again in the runs of its case."""


@dataclass(slots=True, kw_only=True)
class _Earlier:
    """Records that earlier runs have of one worker, all with the inputs of now."""

    latest: WorkerRecord  # record of the latest of these runs, whatever its software
    versions: Mapping[str, object]  # versions of that run, by package
    # by stage: the latest record with the software of now in which the stage had not drifted, and its run's time
    good: dict[str, tuple[WorkerRecord, str]] = field(default_factory=dict)
    reports: dict[str, str] = field(default_factory=dict)  # folders of the reports of these runs, by time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drift:
    """How a worker drifted. Workers with an equal one drifted alike."""

    table: str  # name of the worker's table of digests
    since: str  # time of the run that the worker is compared with
    differing: tuple[tuple[str, tuple[str, ...]], ...]  # stages, each with the names of its tensors that differ
    report: str = ""  # folder of that run's report
    same_bits: str = ""  # time of the latest earlier run with the bits of now; empty where there is none

    @property
    def stages(self) -> list[str]:
        """Return the names of the stages that drifted."""
        return [stage for stage, _ in self.differing]

    @property
    def tensors(self) -> list[str]:
        """Return the names of all tensors that differ, stage by stage."""
        return list(itertools.chain.from_iterable(tensors for _, tensors in self.differing))


@dataclass(frozen=True, slots=True, kw_only=True)
class _DriftGroup:
    """Workers that share a finding, the first of which stands for all."""

    drift: _Drift
    workers: list[WorkerRecord]


@dataclass(slots=True, kw_only=True)
class _ComparedRun:
    """The workers of a run, as the comparison with earlier runs has sorted them."""

    drifted_stages: dict[_WorkerPlace, tuple[str, ...]] = field(default_factory=dict)
    groups: dict[object, _DriftGroup] = field(default_factory=dict)
    # names of the workers whose software is new, by a text that says what changed
    new_software: dict[str, list[str]] = field(default_factory=dict)
    # workers of which no earlier run has the inputs of now
    without_earlier: list[WorkerRecord] = field(default_factory=list)
    compared: int = 0  # number of workers whose bits could be compared


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
    """Return whether every capture was made with all settings fixed: no others promise equal bits."""
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
    """Return a comparison with a finding for each device that has drifted, and the run's record with these drifts.

    An accepted drift is not recorded as one: the device is compared with this run from now on. An accepted loss of a
    device is not recorded either; where one is not accepted, a part was not checked, and the verdict is `incomplete`.
    """
    drift_findings, drifted_stages = find_drift(history, record, tables, comparison, pinned=pinned)
    gone_findings, gone_devices = find_gone(history, record)
    damage = [
        Finding(kind=kinds.DAMAGED_RUN, severity="warning", message=f"history: {text}: left out")
        for text in history.damage
    ]
    comparison = with_findings(comparison, [*gone_findings, *drift_findings, *comparison.findings, *damage])
    if baseline is not None:
        comparison = apply(baseline, comparison)
    # an accepted finding is a note by now, so errors are what nobody has accepted
    errors = [finding for finding in comparison.findings if finding.severity == "error"]
    if any(finding.kind == kinds.GONE_DEVICE for finding in errors):
        comparison = msgspec.structs.replace(comparison, verdict="incomplete")
    else:
        gone_devices = ()
    messages = tuple(finding.message for finding in errors)
    return comparison, msgspec.structs.replace(
        record,
        workers=_judged_workers(record, comparison, errors, drifted_stages),
        verdict=comparison.verdict,
        findings=messages,
        gone=gone_devices,
    )


def _judged_workers(
    record: RunRecord,
    comparison: Comparison,
    errors: Sequence[Finding],
    drifted_stages: Mapping[_WorkerPlace, tuple[str, ...]],
) -> RunWorkers:
    """Return the workers of a run with their verdicts, and with the stages whose drift is an error."""
    verdict_by_worker = verdicts(comparison.workers, comparison.findings)
    drift_errors = (finding for finding in errors if finding.kind == kinds.DRIFT)
    drifted_names = set(itertools.chain.from_iterable(finding.workers for finding in drift_errors))
    judged_workers = []
    for worker in record.workers:
        stages: tuple[str, ...] = ()
        if worker.name in drifted_names:
            stages = drifted_stages.get((worker.device, worker.load_path), ())
        verdict = verdict_by_worker.get(worker.name, "")
        judged_workers.append(msgspec.structs.replace(worker, verdict=verdict, drift=stages))
    return RunWorkers.of(judged_workers)


def find_drift(
    history: History,
    run: RunRecord,
    tables: dict[str, bytes],
    comparison: Comparison | None = None,
    *,
    pinned: bool = True,
) -> tuple[list[Finding], dict[_WorkerPlace, tuple[str, ...]]]:
    """Return findings about devices that drifted, and the drifted stages by device and load path.

    Where inputs or software changed, bits are not compared, and a note says so. Where the settings are not `pinned`,
    computed bits may change from run to run, so their drift is a note; that of bits that are only moved stays an error.

    `comparison` is of the same run: a finding states how large the drift is where it is given.
    """
    earlier_by_worker = _find_earlier(history, run)
    tensors = _Tensors(history, tables)
    compared_run = _compare_workers(history, run, earlier_by_worker, tensors)
    drifted_stages = compared_run.drifted_stages
    several_devices = len({device for device, _ in drifted_stages}) > 1
    is_common = several_devices and len(drifted_stages) == compared_run.compared
    findings = []
    for group in compared_run.groups.values():
        error_size = ""
        if comparison is not None:
            error_size = _error_size(comparison, group.workers[0], group.drift.tensors, group.drift.report)
        finding = _drift_finding(group, tensors.now(group.drift.table), error_size, is_common=is_common)
        is_moved = any(stage in MOVES_WEIGHTS for stage in group.drift.stages)
        if not pinned and not is_moved:
            message = finding.message + AS_DEPLOYED
            finding = msgspec.structs.replace(finding, severity="note", message=message, next=None)
        findings.append(finding)
    findings += _input_notes(history, run, compared_run.without_earlier)
    findings += _software_notes(compared_run.new_software)
    return findings, drifted_stages


def _compare_workers(
    history: History, run: RunRecord, earlier_by_worker: Mapping[_WorkerPlace, _Earlier], tensors: _Tensors
) -> _ComparedRun:
    """Compare each worker of a run with its earlier records, and sort the workers by the outcome."""
    compared_run = _ComparedRun()
    is_fleet = len(run.workers.devices) > MOST_APART
    for worker in run.workers:
        earlier = earlier_by_worker.get((worker.device, worker.load_path))
        if earlier is None:
            compared_run.without_earlier.append(worker)
            continue
        compared_run.compared += bool(earlier.good)
        if not earlier.good and earlier.latest.software != worker.software:
            changes = _software_changes(earlier, run, worker)
            compared_run.new_software.setdefault(changes, []).append(worker.name)
        drift = _find_worker_drift(history, run, worker, earlier, tensors)
        if drift is None:
            continue
        compared_run.drifted_stages[worker.device, worker.load_path] = tuple(drift.stages)
        # of a fleet, workers that drifted alike share a finding; of few devices, each has its own
        group_key = drift if is_fleet else worker.key
        group = compared_run.groups.setdefault(group_key, _DriftGroup(drift=drift, workers=[]))
        group.workers.append(worker)
    return compared_run


def _find_worker_drift(
    history: History, run: RunRecord, worker: WorkerRecord, earlier: _Earlier, tensors: _Tensors
) -> _Drift | None:
    """Return how a worker drifted; None where it did not."""
    differing: dict[str, tuple[str, ...]] = {}
    for stage in sorted(earlier.good, key=stage_order):
        before, _ = earlier.good[stage]
        if before.bits[stage] == worker.bits[stage]:
            continue
        # digests of stages also differ where one of the runs checked more tensors, which is no drift
        differing_tensors = tensors.differing(before.table, worker.table, stage)
        if differing_tensors:
            differing[stage] = differing_tensors
    if not differing:
        return None
    since = max(earlier.good[stage][1] for stage in differing)
    return _Drift(
        table=worker.table,
        since=since,
        differing=tuple(differing.items()),
        report=earlier.reports[since],
        same_bits=_find_same_bits(history, run, worker, tuple(differing)),
    )


def _input_notes(history: History, run: RunRecord, workers: Sequence[WorkerRecord]) -> list[Finding]:
    """Return a note about workers without an earlier record, if their case ran on their devices with other inputs."""
    if not workers:
        return []
    since = _find_other_inputs(history, run, workers)
    if not since:
        return []
    names = tuple(worker.name for worker in workers)
    inputs = "base, adapter, config, factory, text, dtype or level"
    message = f"{some(names)}: other inputs than in the run of {when(since)} ({inputs}); bits not compared"
    return [Finding(kind=kinds.INPUTS, severity="note", message=message, workers=names)]


def _software_notes(new_software: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Return a note for each change of software, about all of its workers."""
    notes = []
    for changes, names in new_software.items():
        message = f"{some(names)}: software or settings changed since the previous run{changes}; bits not compared"
        notes.append(Finding(kind=kinds.SOFTWARE, severity="note", message=message, workers=tuple(names)))
    return notes


def compared_with(history: History, run: RunRecord) -> set[str]:
    """Return the times of the runs that the workers of a run are compared with."""
    times: set[str] = set()
    for earlier in _find_earlier(history, run).values():
        times.update(at for _, at in earlier.good.values())
    return times


def _find_earlier(history: History, run: RunRecord) -> dict[_WorkerPlace, _Earlier]:
    """Return the records that earlier runs have of each worker of a run, by device and load path."""
    workers = {(worker.device, worker.load_path): worker for worker in run.workers if worker.status == "ok"}
    if not workers:
        return {}
    search = _EarlierSearch(run=run, workers=workers)
    inputs = {worker.inputs for worker in workers.values()}
    software = {worker.software for worker in workers.values()}
    unmet_devices, met_devices = {device for device, _ in workers}, set[str]()
    for earlier_run in history.earlier():
        records: list[WorkerRecord] = []
        if unmet_devices:
            records += earlier_run.workers.select(unmet_devices, inputs=inputs)
        # a record with other software tells only that the software has changed, and one such record is enough
        if met_devices:
            records += earlier_run.workers.select(met_devices, inputs=inputs, software=software)
        for record in records:
            search.take(earlier_run, record)
        unmet_devices, met_devices = search.devices()
        if not unmet_devices and not met_devices:
            break
    return search.earlier


class _EarlierSearch:
    """The search for the earlier records of a run's workers, from the latest earlier run backwards.

    It is over for a worker when each of its stages has a record in which that stage had not drifted.
    """

    def __init__(self, *, run: RunRecord, workers: Mapping[_WorkerPlace, WorkerRecord]) -> None:
        self.earlier: dict[_WorkerPlace, _Earlier] = {}
        self._run = run
        self._workers = workers
        self._missing_stages = {place: set(worker.bits) for place, worker in workers.items()}

    def take(self, run: RunRecord, record: WorkerRecord) -> None:
        """Take a record of an earlier run, if it is of a worker that is searched for, with the same inputs."""
        place = (record.device, record.load_path)
        missing_stages = self._missing_stages.get(place)
        if not missing_stages or record.status != "ok":
            return
        worker = self._workers[place]
        if record.inputs != worker.inputs or not _is_same_case(run, record, self._run, worker):
            return
        earlier = self.earlier.setdefault(place, _Earlier(latest=record, versions=run.versions))
        if record.software != worker.software:
            return
        for stage in missing_stages & record.bits.keys() - set(record.drift):
            earlier.good[stage] = (record, run.at)
            earlier.reports[run.at] = run.report
            missing_stages.discard(stage)

    def devices(self) -> tuple[set[str], set[str]]:
        """Return the devices that are searched for on: those without any record yet, and the others."""
        searched = [place for place, stages in self._missing_stages.items() if stages]
        unmet_devices = {device for device, load_path in searched if (device, load_path) not in self.earlier}
        return unmet_devices, {device for device, _ in searched} - unmet_devices


def _find_other_inputs(history: History, run: RunRecord, workers: Sequence[WorkerRecord]) -> str:
    """Return the time of the latest run of the same case on one of these devices, or an empty text."""
    devices = {worker.device for worker in workers}
    cases_on_devices = {(worker.device, worker.case or run.case) for worker in workers}
    for earlier_run in history.earlier():
        for record in earlier_run.workers.select(devices):
            if (record.device, record.case or earlier_run.case) in cases_on_devices and record.status == "ok":
                return earlier_run.at
    return ""


def _find_same_bits(history: History, run: RunRecord, worker: WorkerRecord, stages: Sequence[str]) -> str:
    """Return the time of the latest earlier run in which a worker had these bits without a drift, or an empty text."""
    for earlier_run in history.earlier():
        records = earlier_run.workers.select({worker.device}, inputs={worker.inputs}, software={worker.software})
        for record in records:
            is_same = record.load_path == worker.load_path and _is_same_case(earlier_run, record, run, worker)
            has_drifted = not set(stages).isdisjoint(record.drift)
            if not is_same or has_drifted:
                continue
            if all(record.bits.get(stage) == worker.bits[stage] for stage in stages):
                return earlier_run.at
    return ""


def _is_same_case(earlier_run: RunRecord, record: WorkerRecord, run: RunRecord, worker: WorkerRecord) -> bool:
    """Return whether a worker may be compared with a record of an earlier run: both are of the same case.

    Cases of suites have names, which count. Two runs of one case each may have other names: where the inputs are the
    same, nothing but the name can differ.
    """
    if not record.case and not worker.case:
        return True
    return (record.case or earlier_run.case) == (worker.case or run.case)


class _Tensors:
    """The tables of a run and of earlier ones, each read once: thousands of workers share a few."""

    def __init__(self, history: History, tables: Mapping[str, bytes]) -> None:
        self._before = functools.cache(history.table)
        self.now = functools.cache(lambda name: msgspec.json.decode(tables[name], type=Table))
        self.differing = functools.cache(self._differing)

    def _differing(self, earlier_name: str, name: str, stage: str) -> tuple[str, ...]:
        """Return the tensors of a stage whose bits differ; a tensor that only one of two runs checked is no drift."""
        earlier_table, table = self._before(earlier_name), self.now(name)
        tensors = tuple(tensor for tensor in table if tensor.startswith(f"{stage}::"))
        if earlier_table is None:  # without the table it is known that they differ, but not where
            return tensors
        both = (tensor for tensor in tensors if tensor in earlier_table)
        return tuple(tensor for tensor in both if earlier_table[tensor] != table[tensor])


_ALONE = "run again: a device whose results change between runs is failing; check its ECC error counters"
_TOGETHER = (
    "look for what all devices have in common: code that the model imports, a file that no stage reads, a library, the "
    "host's memory"
)


def _drift_finding(group: _DriftGroup, table: Table, error_size: str, *, is_common: bool = False) -> Finding:
    """Return the finding about workers that drifted alike.

    `table` has the digests of their tensors; `error_size` says how large the drift is, and may be empty; `is_common`
    says that all devices that were compared drifted.
    """
    drift, devices = group.drift, _device_names(group.workers)
    counts = []
    for stage, differing in drift.differing:
        checked = sum(name.startswith(f"{stage}::") for name in table)
        counts.append(f"{len(differing)} of {checked} {stage}")
    message = (
        f"drift · {devices} · {', '.join(counts)} tensors differ bitwise from the run of "
        f"{when(drift.since)}: same inputs, same software"
    )
    if drift.same_bits:
        message += f"; they are those of the run of {when(drift.same_bits)}"
    if is_common:
        message += "; every device that is compared drifted, so the cause is common to them"
    general = (
        f"drift · {devices} · {', '.join(drift.stages)} tensors differ "
        "bitwise from an earlier run: same inputs, same software"
    )
    detail = drift.tensors[:_MOST_DETAILS]
    if error_size:
        detail.append(error_size)
    if drift.report:
        detail.append(f"the earlier run's report: {drift.report}")
    return Finding(
        kind=kinds.DRIFT,
        severity="error",
        message=message,
        general=general,
        workers=tuple(worker.name for worker in group.workers),
        tensors=tuple(drift.tensors),
        detail=tuple(detail),
        next=_TOGETHER if is_common else _ALONE,
        state=digest_of(sorted(f"{name}={table[name]}" for name in drift.tensors)),
    )


def _device_names(workers: Sequence[WorkerRecord]) -> str:
    """Return the names of workers, and the identity of a single one where its name does not say it."""
    if len(workers) > 1:
        return some([worker.name for worker in workers])
    (worker,) = workers
    return worker.name if worker.device.endswith(f"/{worker.name}") else f"{worker.name} ({worker.device})"


def _software_changes(earlier: _Earlier, run: RunRecord, worker: WorkerRecord) -> str:
    """Return the changes of versions and driver in brackets; empty where only settings or unrecorded parts changed."""
    changes = []
    for package, version in run.versions.items():
        earlier_version = earlier.versions.get(package)
        if earlier_version != version:
            changes.append(f"{package} {earlier_version} -> {version}")
    earlier_driver = earlier.latest.driver
    if earlier_driver and worker.driver and earlier_driver != worker.driver:
        changes.append(f"driver {earlier_driver} -> {worker.driver}")
    return f" ({', '.join(changes)})" if changes else ""


def _error_size(comparison: Comparison, worker: WorkerRecord, tensors: Sequence[str], report: str) -> str:
    """Return a sentence about the drifted tensor that is furthest from the exact values; empty where none is known.

    `report` is the folder of the earlier run's report. A capture has errors against the exact values and digests, not
    the tensors: two results that are off by a and by b from the same exact values are at most a + b apart.
    """
    earlier_errors = _earlier_errors(worker, set(tensors), report)
    measured = list(_measured_outcomes(comparison, worker, earlier_errors))
    if not measured:
        return ""
    outcome, name = max(measured, key=_outcome_size)
    error, earlier_error = float(outcome.max_abs or 0), earlier_errors[name]
    allowed = f", allowed {float(outcome.allowed):.2g}" if outcome.allowed else ""
    return (
        f"{name}: off from the exact values by at most {error:.2g} in this run{allowed}, and {earlier_error:.2g} in "
        f"the earlier one, so by at most {error + earlier_error:.2g} between the two"
    )


def _measured_outcomes(
    comparison: Comparison, worker: WorkerRecord, earlier_errors: Mapping[str, float]
) -> Iterator[tuple[Outcome, str]]:
    """Yield the outcomes of a worker with an error in both runs, each with the name of its tensor.

    Errors against a file are left out: those are not against exact values.
    """
    for tensor in comparison.tensors:
        if tensor.load_path != worker.load_path or tensor.name not in earlier_errors:
            continue
        for outcome in tensor.outcomes:
            has_error = outcome.max_abs is not None and outcome.reference not in (None, "file")
            if worker.name in outcome.workers and has_error:
                yield outcome, tensor.name


def _outcome_size(measured: tuple[Outcome, str]) -> float:
    """Return the ratio of an outcome, or its largest error where it has no ratio."""
    outcome, _ = measured
    return float(outcome.max_abs or 0) if outcome.ratio is None else float(outcome.ratio)


def _earlier_errors(worker: WorkerRecord, tensors: set[str], report: str) -> dict[str, float]:
    """Return the largest error of each of these tensors in the earlier run, where that was measured."""
    if not report or not Path(report).is_dir():
        return {}
    try:
        capture = read_capture(Path(report))
    except CaptureError:
        return {}
    errors: dict[str, float] = {}
    for captured in capture.workers:
        if captured.info.name != worker.name:
            continue
        for record in itertools.chain.from_iterable(captured.parts):
            is_of_load_path = record.load_path in ("", worker.load_path)
            if record.measure is None or not is_of_load_path:
                continue
            name = tensor_name(*record.key)
            if name in tensors:
                errors[name] = float(record.measure.max_abs)
    return errors
