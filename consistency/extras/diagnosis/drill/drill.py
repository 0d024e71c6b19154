"""The drill: run a case with one fault planted at a time, and check that it is found and named.

It shows users and developers that the tool detects what it claims to, on the built-in case or on their own. Each fault
goes into one worker's real loading path; the run around it is that of `consistency run`. All faults are the cases of
one suite: a worker takes them in turn, and a new one is started only where a fault ends it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from consistency.case.builtin import BUILTIN_CASES, resolve
from consistency.case.load_path import LoadPath
from consistency.case.named_adapters import NamedAdapter
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.stage import Adapters, Stage
from consistency.case.stages import SPECS
from consistency.comparison.result import Comparison, Finding, with_provenance
from consistency.devices.discovery import accelerators, select
from consistency.devices.spec import DeviceInfo
from consistency.errors import InputError, UsageError, did_you_mean
from consistency.extras.diagnosis.drill.plantable import Subject, expected_in, subject_of, why_not
from consistency.launch.plan import default_load_paths
from consistency.launch.scheduler import Watcher
from consistency.worker.faults.catalogue import FAULTS
from consistency.worker.faults.fault import Fault, Need
from consistency.workflows import judging, pipeline, report_folder
from consistency.workflows.planning import budget_of, that_fit
from consistency.workflows.suite import PlannedCase, SuitePlan, captured, slowest_s

TRIALS_AT_ONCE = 2
"""On the CPU: while one waits for a worker that is lost, another one goes on. Two, whatever the cores: the most with
which the whole drill was run."""

HEALTHY = "no-fault"
"""Name of the run of a user's case without a fault."""

_KnownWarnings = frozenset[tuple[str, str]]
"""Kind and worker of warnings that a case has without a fault."""


class DrillRow(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one fault."""

    fault: str
    case: str | None
    worker: str  # where it was planted
    expected: str
    named: str | None  # kind of the first finding about that worker
    found: bool  # whether there is a finding about that worker, and none about another
    message: str
    # false where the fault would change nothing in this case, or this host lacks the devices; `message` says why
    planted: bool = True

    @property
    def passed(self) -> bool:
        return self.found and self.named == self.expected


class ListedFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault that can be planted; `needs` says what it takes besides the CPU and the built-in case."""

    fault: str
    case: str | None
    stages: tuple[str, ...]
    expected: str
    needs: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fault and the worker that gets it."""

    fault: Fault
    worker: str
    expected: str  # kind of the finding that has to name it in this case
    why_not: str = ""  # why it is not planted
    planned: PlannedCase | None = None  # its case, if it is
    # whether the finding may be of the fault's kind `without_form`: of LoRA alone each cause is searched for
    may_lack_cause: bool = False
    # kind and worker of the warnings that the case has without a fault, which say nothing of one
    known: _KnownWarnings = frozenset()


def listed(only: Sequence[str]) -> tuple[ListedFault, ...]:
    """Return these faults, or all, without asking for devices."""
    return tuple(
        ListedFault(
            fault=fault.name, case=fault.case, stages=fault.stages, expected=fault.expected, needs=_device_needs(fault)
        )
        for fault in _named_faults(only)
    )


def _named_faults(names: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of these names, or all; raise UsageError where there is none of a name."""
    for name in names:
        if name not in FAULTS:
            hint = did_you_mean(name, FAULTS) or "`consistency drill --list` lists them"
            raise UsageError(f"unknown fault: {name}", where="--only", hint=hint)
    return tuple(FAULTS[name] for name in names or FAULTS)


def _device_needs(fault: Fault) -> str:
    """Return what a fault takes besides the CPU and the built-in case; empty where that is all."""
    if Need.QUANTIZED in fault.needs:
        return "a quantized base"
    if fault.two_devices:
        return "two accelerators"
    return "an accelerator" if fault.accelerators else ""


def choose(only: Sequence[str]) -> tuple[Fault, ...]:
    """Return these faults, or all.

    Raises
    ------
    UsageError
        There is none of such a name, or one that was named needs devices that this host does not have.
    """
    faults = _named_faults(only)
    missing = next((fault for fault in faults if _lacks_devices(fault)), None)
    if only and missing is not None:
        needs, where = _device_needs(missing), f"--only {missing.name}"
        raise UsageError(f"this fault needs {needs}", where=where, got=len(accelerators()))
    return faults


def _lacks_devices(fault: Fault) -> bool:
    """Return whether this host has too few accelerators for a fault."""
    return bool(fault.accelerators) and len(accelerators()) < fault.accelerators


def is_own(options: Options) -> bool:
    """Return whether options describe another case than the one that ships with the package."""
    return bool(options.base or options.adapter) or options.dtype != "auto"


def first_adapter(options: Options) -> Path | None:
    """Return the folder of a case's adapter, None where it has none."""
    adapter = prepare_case(options).adapter
    return None if adapter is None else Path(adapter)


def prepare_trials(
    faults: Sequence[Fault],
    options: Options,
    *,
    several: tuple[NamedAdapter, ...] | None,
    out: Path | None,
    watch: Watcher,
    replace: bool = False,
) -> tuple[Trial, ...]:
    """Plan a run for each fault that applies to the case; a user's own case is first run without one.

    `several` are the case's adapter and a second one, for faults that take two; they have to be there until the drill
    ends.

    Raises
    ------
    InputError
        That run has errors, so that nobody could tell what a fault is found by.
    UsageError
        None of the faults applies.
    """
    devices = _devices(options.devices, two=False)
    accelerated = [info for info in devices if not info.spec.is_cpu]
    healthy: Comparison | None = None
    healthy_options = without_fault(faults, options, several) if is_own(options) else None
    if healthy_options is not None and healthy_options.stages:
        names = tuple(info.spec.name for info in devices)
        plan = pipeline.prepare(dataclasses.replace(healthy_options, devices=names))
        plan = dataclasses.replace(plan, case=msgspec.structs.replace(plan.case, load_paths=_load_paths(faults, plan)))
        folder = None if out is None else out / HEALTHY
        healthy = pipeline.run(plan, folder, watch=watch, replace=replace).comparison
        check_healthy(healthy)
        case = plan.case
    else:
        case = prepare_case(options)
    ranks = max(Counter(info.spec.type for info in accelerated or devices).values())
    subject = subject_of(case, workers=len(devices), ranks=ranks, healthy=healthy)
    known = frozenset() if healthy is None else _warnings(healthy)
    trials = tuple(trial_of(fault, options, subject, several, known=known) for fault in faults)
    if not any(trial.planned for trial in trials):
        raise UsageError("none of these faults can be planted in this case", got=trials[0].why_not)
    return trials


def without_fault(
    faults: Sequence[Fault], options: Options, several: tuple[NamedAdapter, ...] | None = None
) -> Options:
    """Return the options of a run with every stage that a fault needs, as far as the case can have it."""
    _, adapter = resolve(options.base, options.adapter)
    has_adapter = bool(adapter or options.adapters)
    needed: set[Stage] = set()
    for fault in faults:
        is_in_case = not fault.base and (several or not fault.several)
        if is_in_case:
            needed.update(stage for stage in fault.stages if has_adapter or not SPECS[stage].needs_adapter)
    wrapper = next((fault.wrapper for fault in faults if fault.wrapper and needed.issuperset(fault.stages)), None)
    stages = tuple(stage for stage in SPECS if stage in needed)
    healthy_options = dataclasses.replace(options, stages=stages, wrapper=wrapper)
    takes_several = any(SPECS[stage].adapters is Adapters.ALL for stage in needed)
    return with_adapters(healthy_options, several) if takes_several else healthy_options


def _load_paths(faults: Sequence[Fault], plan: pipeline.Plan) -> tuple[LoadPath, ...]:
    """Return the load paths of a run, and those of faults: a loader may have findings of its own."""
    load_paths = set(default_load_paths(plan.devices, sides=plan.case.plan.sides))
    for fault in faults:
        if not fault.two_devices:
            load_paths.update(fault.load_paths or ())
    return tuple(path for path in LoadPath if path in load_paths)


def with_adapters(options: Options, several: tuple[NamedAdapter, ...] | None) -> Options:
    """Return the options of a case with several adapters, the first of which is its own."""
    base = options.base or f"builtin:{BUILTIN_CASES[0]}"
    return dataclasses.replace(options, base=base, adapter=None, adapters=several or ())


def check_healthy(healthy: Comparison) -> None:
    """Raise InputError if a run without a fault has an error, so that nobody could tell what a fault is found by."""
    errors = [finding for finding in healthy.findings if finding.severity == "error"]
    if errors or healthy.verdict != "consistent":
        raise InputError(
            "without any fault planted the case is not consistent, so a drill would prove nothing",
            got=errors[0].message if errors else healthy.verdict,
            hint="settle that first: `consistency run` with the same options reports it",
        )


def _warnings(healthy: Comparison) -> _KnownWarnings:
    """Return the warnings of a run without a fault."""
    warnings = (finding for finding in healthy.findings if finding.severity == "warning")
    return frozenset(itertools.chain.from_iterable(map(_kinds_and_workers, warnings)))


def _kinds_and_workers(finding: Finding) -> _KnownWarnings:
    """Return the kind of a finding with each of its workers, or with an empty name where it is about none."""
    return frozenset((finding.kind, worker) for worker in finding.workers or ("",))


def _is_known(finding: Finding, known: _KnownWarnings) -> bool:
    """Return whether a finding is a warning that the case has without a fault too."""
    return finding.severity == "warning" and _kinds_and_workers(finding) <= known


def trial_of(
    fault: Fault,
    options: Options,
    subject: Subject,
    several: tuple[NamedAdapter, ...] | None,
    *,
    name: str = "",
    known: _KnownWarnings = frozenset(),
) -> Trial:
    """Plan one fault in a case; `name` is the name of its run, by default the fault's."""
    expected = expected_in(fault, subject)
    if _lacks_devices(fault):
        return Trial(fault=fault, worker="", expected=expected, why_not=f"needs {_device_needs(fault)}")
    devices = _devices(options.devices, two=fault.two_devices)
    worker = devices[-1].spec.name
    reason = why_not(fault, subject)
    if fault.several and several is None:
        reason = reason or "no second adapter can be made of the case's"
    if fault.base and is_own(options):
        reason = "the fault is in a base that the drill makes itself"
    if reason:
        return Trial(fault=fault, worker=worker, expected=expected, why_not=reason)
    trial_options = _trial_options(fault, options, subject, devices, name=name or fault.name)
    if fault.several:
        trial_options = with_adapters(trial_options, several)
    plan = pipeline.prepare(trial_options)
    planned = PlannedCase(options=trial_options, plan=plan, below="").with_faults({worker: fault.name})
    is_plain_lora = subject.config.get("peft_type") == "LORA" and not subject.config.get("use_dora")
    return Trial(
        fault=fault, worker=worker, expected=expected, planned=planned, may_lack_cause=not is_plain_lora, known=known
    )


def _trial_options(
    fault: Fault, options: Options, subject: Subject, devices: Sequence[DeviceInfo], *, name: str
) -> Options:
    """Return the options of the run of a fault: those of the case, with the stages and load paths of the fault."""
    only: tuple[str, ...] = ()
    if fault.one_layer:
        only = (f"{fault.stages[0]}::{subject.of_lora('lora_A')[0]}",)
    return dataclasses.replace(
        options,
        name=name,
        base=fault.base or options.base,
        devices=tuple(info.spec.name for info in devices),
        stages=fault.stages,
        level=fault.level or options.level,
        repeat=fault.repeat,
        steps=fault.steps,
        soak=fault.soak_s,
        only=only,
        load_paths=(LoadPath.SHARED,) if fault.two_devices else fault.load_paths,
        wrapper=fault.wrapper,
        placement="offload" if fault.offloads else "auto",
    )


def drill(
    trials: Sequence[Trial], *, out: Path | None, watch: Watcher, replace: bool = False, fail_fast: bool = False
) -> tuple[DrillRow, ...]:
    """Run every trial that is planned, in one set of workers; `out/FAULT/` holds its report and captures.

    With `fail_fast`, those after the first whose fault is not found and named are not planted.
    """
    suite = plan_of(trials)
    trial_by_name = {trial.planned.name: trial for trial in trials if trial.planned}
    row_by_name: dict[str, DrillRow] = {}
    writes = [case.folder for case in suite.cases]
    with (
        report_folder.output(out, replace=replace, writes=writes, keeps=_has_reports) as folder,
        closing(captured(suite, folder, report_folder.CAPTURES, watch=watch, replace=replace)) as ended,
    ):
        for case, case_captures in ended:
            if case_captures.error is not None:
                raise case_captures.error
            captures, unread = judging.read_captures(case_captures.captures)
            comparison = judging.compare_captures(captures, unread=[*case_captures.lost, *unread])
            comparison = with_provenance(comparison, slowest_s(comparison))
            row = _row(trial_by_name[case.name], comparison)
            row_by_name[case.name] = row
            if out is None:
                shutil.rmtree(folder / case.folder, ignore_errors=True)
            else:
                report_folder.write_reports(comparison, out / case.folder)
            if fail_fast and not row.passed:
                break
    left_out = f"--fail-fast: {next(reversed(row_by_name), '')} was not found and named"
    rows = []
    for trial in trials:
        if trial.planned is None:
            rows.append(_not_planted(trial))
        else:
            rows.append(row_by_name.get(trial.planned.name) or _not_planted(trial, left_out))
    return tuple(rows)


def plan_of(trials: Sequence[Trial]) -> SuitePlan:
    """Return the trials as a suite."""
    cases = tuple(trial.planned for trial in trials if trial.planned is not None)
    limits = [case.plan.limits for case in cases if case.plan is not None]
    fewest = min((limit.at_once for limit in limits if limit.at_once is not None), default=None)
    shared = dataclasses.replace(limits[0], at_once=fewest, cases_at_once=_at_once(cases))
    return SuitePlan(name="drill", cases=cases, limits=shared)


def _at_once(cases: Sequence[PlannedCase]) -> int:
    """Return how many trials run side by side: several only on the CPU, where no number of threads is asked for."""
    plans = [case.plan for case in cases if case.plan is not None]
    devices = itertools.chain.from_iterable(plan.devices for plan in plans)
    on_cpu = all(info.spec.is_cpu for info in devices)
    if not on_cpu or any(plan.limits.threads is not None for plan in plans):
        return 1
    fit = that_fit(budget_of(plans[0].case, plans[0].devices))
    return TRIALS_AT_ONCE if fit is None else max(1, min(TRIALS_AT_ONCE, fit))


def _has_reports(folder: Path) -> bool:
    return any(folder.glob("*/report.json"))


def _devices(names: Sequence[str], *, two: bool) -> tuple[DeviceInfo, ...]:
    """Return the devices of a run; the last one gets the fault, and is the reference only where there is no other.

    Of `auto` that is the reference and one more. Where a fault needs two accelerators the second gets it: PEFT goes
    through the first by default.
    """
    devices = select(names)
    if two:
        return (devices[0], accelerators()[1])
    # the plain CPU is the reference of every run, so it comes first
    plain_cpu = [info for info in devices if info.spec.is_cpu and info.spec.variant is None]
    devices = (*plain_cpu, *(info for info in devices if info not in plain_cpu))
    return devices[:2] if tuple(names) == ("auto",) else devices


def _not_planted(trial: Trial, reason: str = "") -> DrillRow:
    """Return the row of a fault that was not planted, by default for the reason that the trial has."""
    fault = trial.fault
    return DrillRow(
        fault=fault.name,
        case=fault.case,
        worker=trial.worker,
        expected=trial.expected,
        named=None,
        found=False,
        message=reason or trial.why_not,
        planted=False,
    )


def _row(trial: Trial, comparison: Comparison) -> DrillRow:
    """Return the row of a fault that was planted, from the comparison of its run."""
    fault, worker = trial.fault, trial.worker
    # notes count only where the fault is expected to be one; warnings of the case itself never do
    findings = []
    for finding in comparison.findings:
        is_expected_note = fault.is_note and finding.kind == fault.expected
        counts = finding.severity != "note" or is_expected_note
        if counts and not _is_known(finding, trial.known):
            findings.append(finding)
    # the words are part of the name: one kind can have several causes
    about_worker = (finding for finding in findings if finding.workers == (worker,))
    first = next((finding for finding in about_worker if re.search(fault.words, finding.message)), None)
    if first is None:
        untaken = _untaken_load_path(fault, comparison)
        if untaken:
            return _not_planted(trial, untaken)
        return _planted_row(trial, expected=trial.expected, named=None, found=False, message="")
    lacks_cause = trial.may_lack_cause and first.kind == fault.without_form
    return _planted_row(
        trial,
        expected=first.kind if lacks_cause else trial.expected,
        named=first.kind,
        found=all(finding.workers == (worker,) for finding in findings),
        message=first.message,
    )


def _planted_row(trial: Trial, *, expected: str, named: str | None, found: bool, message: str) -> DrillRow:
    return DrillRow(
        fault=trial.fault.name,
        case=trial.fault.case,
        worker=trial.worker,
        expected=expected,
        named=named,
        found=found,
        message=message,
    )


def _untaken_load_path(fault: Fault, comparison: Comparison) -> str:
    """Return why a load path that a fault is in was not taken, empty where all were."""
    for load_path in fault.load_paths or ():
        tensors = (tensor for tensor in comparison.tensors if tensor.load_path == load_path)
        outcomes = list(itertools.chain.from_iterable(tensor.outcomes for tensor in tensors))
        reason = next((outcome.reason for outcome in outcomes if outcome.reason), "")
        if reason and all(outcome.status == "skipped" for outcome in outcomes):
            return f"load path {load_path}: {reason}"
    return ""
