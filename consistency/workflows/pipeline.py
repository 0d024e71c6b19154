"""The steps of a run, composed here alone: case and devices -> capture -> compare -> files of a report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from consistency.capture.claim import claim_of, claimed, scratch_folder
from consistency.capture.folder import Capture
from consistency.capture.reader import read_capture
from consistency.capture.transport import deliver, is_remote, refuse_to_replace, travels
from consistency.case.budget.fit import Budget
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.stages import MODEL_LESS, SPECS
from consistency.comparison.result import Comparison, Finding, with_provenance
from consistency.devices.discovery import select
from consistency.devices.spec import DeviceInfo
from consistency.launch.plan import default_load_paths, plan_waves
from consistency.launch.scheduler import LOCAL, Captured, CaseTask, Limits, Watcher, capture_case, make_scheduler
from consistency.workflows.judging import compare_captures, read_captures
from consistency.workflows.past import NO_PAST, Past
from consistency.workflows.planning import budget_of
from consistency.workflows.report_folder import (
    CAPTURES,
    folders_of,
    output,
    refuse_among_weights,
    remove_reports,
    write_reports,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A valid case, the devices it runs on, and how long it may take."""

    case: Case
    devices: tuple[DeviceInfo, ...]
    limits: Limits
    faults: Mapping[str, str] = field(default_factory=dict)
    """Fault to plant (of `consistency.worker.faults`) by name of the device, to test the tool itself."""
    scheduler: str = LOCAL
    """Name of the scheduler that runs the workers: see `consistency.launch.scheduler`."""
    stages: Mapping[str, Sequence[tuple[str, float]]] = field(default_factory=dict)
    """Stages by the name of the worker, with the part of the worker's time that they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a run.

    Attributes
    ----------
    folder : Path or None
        Folder with the files of the report and `captures/`; None where nothing was kept.
    elapsed_s : float
        Seconds that the run took; 0 in a report of an earlier version, which does not tell.
    """

    comparison: Comparison
    folder: Path | None
    elapsed_s: float

    def __repr__(self) -> str:
        """Return the text of the comparison, with the name of this class."""
        return repr(self.comparison).replace("<Comparison", "<Report", 1)

    @property
    def verdict(self) -> str:
        return self.comparison.verdict

    @property
    def exit_status(self) -> int:
        return self.comparison.exit_status

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.comparison.findings


def prepare(options: Options) -> Plan:
    """Check everything that can be checked before a worker starts."""
    return plan_of(prepare_case(options), options)


def plan_of(case: Case, options: Options) -> Plan:
    """Return the plan of a case on the devices, and within the limits, that the options name; cut to what fits.

    Raises
    ------
    InputError
        The case does not fit the memory of this host, however it is cut.
    """
    # an error names the option as the user has written it
    with options.source.naming():
        devices = select(options.devices)
        budget = budget_of(case, devices)
        if budget.refusal is not None:
            raise budget.refusal
    return plan_within(budget, options, devices)


def plan_within(budget: Budget, options: Options, devices: tuple[DeviceInfo, ...]) -> Plan:
    """Return the plan of a case that fits, on these devices."""
    limits = Limits(timeout_s=options.timeout, stall_s=options.stall, threads=options.threads, at_once=budget.at_once)
    stages = {worker.worker: worker.shares(budget.case) for worker in budget.workers}
    return Plan(case=budget.case, devices=devices, limits=limits, stages=stages)


def expected(plan: Plan) -> Mapping[str, Mapping[str, Sequence[tuple[str, float]]]]:
    """Return the stages of the workers by the name of the case, for a display of the progress."""
    return {plan.case.name: plan.stages}


def capture(plan: Plan, target: Path, *, watch: Watcher, replace: bool = False) -> Captured:
    """Have the plan's scheduler run one worker per device and load path, and leave captures at `target`."""
    return capture_case(
        make_scheduler(plan.scheduler), task_of(plan, target), plan.limits, watch=watch, replace=replace
    )


def task_of(plan: Plan, target: Path) -> CaseTask:
    """Return the task of a scheduler for a case, whose captures go to `target`."""
    waves = plan_waves(plan.case, plan.devices)
    return CaseTask(case=plan.case, waves=waves, target=target, faults=plan.faults)


def capture_to(plan: Plan, target: str, *, watch: Watcher, replace: bool = False) -> Capture:
    """Leave a capture in a folder, in one file (`….zip`), or at a URL; return the capture."""
    sent = travels(target)
    if not is_remote(target):
        refuse_among_weights(Path(target), *folders_of(plan.case))
    with ExitStack() as stack:
        # now, and not only when the capture is made
        if sent and not replace:
            refuse_to_replace(target)
            if not is_remote(target):
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(claimed(claim_of(Path(target))))
        scratch = stack.enter_context(scratch_folder("capture"))
        folder = Path(scratch, "capture") if sent else Path(target)
        capture(plan, folder, watch=watch, replace=replace)
        made = read_capture(folder)
        if sent:
            if not replace:
                refuse_to_replace(target)  # again: hours have passed
            deliver(folder, target)
    return made


def run(
    plan: Plan,
    out: Path | None,
    *,
    watch: Watcher,
    replace: bool = False,
    past: Past = NO_PAST,
) -> Report:
    """Capture, compare and report.

    Parameters
    ----------
    out : Path or None
        Folder for the files of the report and `captures/`; None keeps nothing.
    replace : bool
        Overwrite the results of an earlier run in `out`.
    past : Past
        Earlier runs to compare with and append to, and accepted findings.
    """
    started = time.monotonic()
    if out is not None:
        refuse_among_weights(out, *folders_of(plan.case))
    with output(out, replace=replace) as folder, past.noted(plan.case.name, out):
        captured = capture(plan, folder / CAPTURES, watch=watch, replace=replace)
        # an earlier report says nothing of the new captures
        remove_reports(folder)
        captures, unread = read_captures(captured.captures)
        comparison = compare_captures(captures, unread=[*captured.lost, *unread])
        comparison = past.judged(captures, comparison, out)
        elapsed_s = time.monotonic() - started
        comparison = with_provenance(comparison, elapsed_s)
        comparison = write_reports(comparison, out)
    return Report(comparison=comparison, folder=out, elapsed_s=elapsed_s)


_STAGES = tuple(stage for stage in MODEL_LESS if SPECS[stage].levels)
"""Stages without a model that some level runs; all others are run only where they are asked for."""


def doctor_plan(options: Options) -> Plan:
    """Return the plan of a run of the stages of a level that need no model, at the level and on the devices given.

    Several accelerators are visible to one another, in one wave: alone with its device a worker sees no pair.
    """
    plan = plan_of(Case(name="doctor", base="", stages=_STAGES, level=options.level), options)
    if LoadPath.SHARED not in default_load_paths(plan.devices):
        return plan
    return dataclasses.replace(plan, case=msgspec.structs.replace(plan.case, load_paths=(LoadPath.SHARED,)))
