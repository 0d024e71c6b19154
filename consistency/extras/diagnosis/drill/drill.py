"""The drill: run a case with one fault planted at a time, and check that it is found and named.

It shows users and developers that the tool detects what it claims to, on the built-in case or on their own. Each fault
goes into one worker's real loading path; the run around it is that of `consistency run`. All faults are the cases of
one suite: a worker takes them in turn, and a new one is started only where a fault ends it.
"""

from __future__ import annotations

import dataclasses
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
from consistency.case.stage import Adapters
from consistency.case.stages import SPECS
from consistency.comparison.result import Comparison, Finding, with_provenance
from consistency.devices.discovery import accelerators, select
from consistency.devices.spec import DeviceInfo
from consistency.errors import InputError, UsageError, did_you_mean
from consistency.extras.diagnosis.drill.plantable import Subject, expected_in, subject_of, why_not
from consistency.launch.engine import Watcher
from consistency.launch.plan import default_load_paths
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


_Known = frozenset[tuple[str, str]]


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
    known: _Known = frozenset()


def listed(only: Sequence[str]) -> tuple[ListedFault, ...]:
    """Return these faults, or all, without asking for devices."""
    return tuple(
        ListedFault(fault=one.name, case=one.case, stages=one.stages, expected=one.expected, needs=_needs(one))
        for one in _named(only)
    )


def _named(only: Sequence[str]) -> tuple[Fault, ...]:
    for name in only:
        if name not in FAULTS:
            hint = did_you_mean(name, FAULTS) or "`consistency drill --list` lists them"
            raise UsageError(f"unknown fault: {name}", where="--only", hint=hint)
    return tuple(FAULTS[name] for name in only or FAULTS)


def _needs(fault: Fault) -> str:
    if Need.QUANTIZED in fault.needs:
        return "a quantized base"
    return "two accelerators" if fault.two_devices else "an accelerator" if fault.accelerators else ""


def choose(only: Sequence[str]) -> tuple[Fault, ...]:
    """Return these faults, or all.

    Raises
    ------
    UsageError
        There is none of such a name, or one that was named needs devices that this host does not have.
    """
    chosen = _named(only)
    missing = next((fault for fault in chosen if _lacks_devices(fault)), None)
    if only and missing is not None:
        raise UsageError(f"this fault needs {_needs(missing)}", where=f"--only {missing.name}", got=len(accelerators()))
    return chosen


def _lacks_devices(fault: Fault) -> bool:
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
    names = tuple(info.spec.name for info in devices)
    accelerated = [info for info in devices if not info.spec.is_cpu]
    healthy: Comparison | None = None
    if is_own(options) and (own := without_fault(faults, options, several)).stages:
        plan = pipeline.prepare(dataclasses.replace(own, devices=names))
        plan = dataclasses.replace(plan, case=msgspec.structs.replace(plan.case, load_paths=_load_paths(faults, plan)))
        watched = None if out is None else out / HEALTHY
        healthy = pipeline.run(plan, watched, watch=watch, replace=replace).comparison
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
    stages = {stage for fault in faults if not fault.base and (several or not fault.several) for stage in fault.stages}
    needed = {stage for stage in stages if adapter or options.adapters or not SPECS[stage].needs_adapter}
    wrapper = next((fault.wrapper for fault in faults if fault.wrapper and needed.issuperset(fault.stages)), None)
    own = dataclasses.replace(options, stages=tuple(stage for stage in SPECS if stage in needed), wrapper=wrapper)
    of_several = any(SPECS[stage].adapters is Adapters.ALL for stage in needed)
    return with_adapters(own, several) if of_several else own


def _load_paths(faults: Sequence[Fault], plan: pipeline.Plan) -> tuple[LoadPath, ...]:
    """Return the load paths of a run, and those of faults: a loader may have findings of its own."""
    taken = {path for fault in faults if not fault.two_devices for path in fault.load_paths or ()}
    default = default_load_paths(plan.devices, sides=plan.case.plan.sides)
    return tuple(path for path in LoadPath if path in {*default, *taken})


def with_adapters(options: Options, several: tuple[NamedAdapter, ...] | None) -> Options:
    """Return the options of a case with several adapters, the first of which is its own."""
    base = options.base or f"builtin:{BUILTIN_CASES[0]}"
    return dataclasses.replace(options, base=base, adapter=None, adapters=several or ())


def check_healthy(healthy: Comparison) -> None:
    """Raise InputError if a run without a fault has an error, so that nobody could tell what a fault is found by."""
    about = [finding for finding in healthy.findings if finding.severity == "error"]
    if about or healthy.verdict != "consistent":
        raise InputError(
            "without any fault planted the case is not consistent, so a drill would prove nothing",
            got=about[0].message if about else healthy.verdict,
            hint="settle that first: `consistency run` with the same options reports it",
        )


def _warnings(healthy: Comparison) -> _Known:
    return frozenset(pair for one in healthy.findings if one.severity == "warning" for pair in _places(one))


def _places(finding: Finding) -> _Known:
    return frozenset((finding.kind, worker) for worker in finding.workers or ("",))


def _is_known(finding: Finding, known: _Known) -> bool:
    return finding.severity == "warning" and _places(finding) <= known


def trial_of(
    fault: Fault,
    options: Options,
    subject: Subject,
    several: tuple[NamedAdapter, ...] | None,
    *,
    name: str = "",
    known: _Known = frozenset(),
) -> Trial:
    """Plan one fault in a case; `name` is that of its run, without one the fault's."""
    expected = expected_in(fault, subject)
    if _lacks_devices(fault):
        return Trial(fault=fault, worker="", expected=expected, why_not=f"needs {_needs(fault)}")
    devices = _devices(options.devices, two=fault.two_devices)
    worker = devices[-1].spec.name
    reason = why_not(fault, subject)
    if fault.several and several is None:
        reason = reason or "no second adapter can be made of the case's"
    if fault.base and is_own(options):
        reason = "the fault is in a base that the drill makes itself"
    if reason:
        return Trial(fault=fault, worker=worker, expected=expected, why_not=reason)
    own = dataclasses.replace(
        options,
        name=name or fault.name,
        base=fault.base or options.base,
        devices=tuple(info.spec.name for info in devices),
        stages=fault.stages,
        repeat=fault.repeat,
        steps=fault.steps,
        soak=fault.soak_s,
        only=(f"{fault.stages[0]}::{subject.of_lora('lora_A')[0]}",) if fault.one_layer else (),
        load_paths=(LoadPath.SHARED,) if fault.two_devices else fault.load_paths,
        wrapper=fault.wrapper,
        placement="offload" if fault.offloads else "auto",
    )
    if fault.several:
        own = with_adapters(own, several)
    planned = PlannedCase(options=own, plan=pipeline.prepare(own), below="").with_faults({worker: fault.name})
    loose = subject.config.get("peft_type") != "LORA" or bool(subject.config.get("use_dora"))
    return Trial(fault=fault, worker=worker, expected=expected, planned=planned, may_lack_cause=loose, known=known)


def drill(
    trials: Sequence[Trial], *, out: Path | None, watch: Watcher, replace: bool = False, fail_fast: bool = False
) -> tuple[DrillRow, ...]:
    """Run every trial that is planned, in one set of workers; `out/FAULT/` holds its report and captures.

    With `fail_fast`, those after the first whose fault is not found and named are not planted.
    """
    suite = plan_of(trials)
    by_name = {trial.planned.name: trial for trial in trials if trial.planned}
    found: dict[str, DrillRow] = {}
    writes = [one.folder for one in suite.cases]
    with (
        report_folder.output(out, replace=replace, writes=writes, keeps=_has_reports) as folder,
        closing(captured(suite, folder, report_folder.CAPTURES, watch=watch, replace=replace)) as ended,
    ):
        for one, captures in ended:
            if captures.error is not None:
                raise captures.error
            read, unread = judging.read_captures(captures.captures)
            comparison = judging.compare_captures(read, unread=[*captures.lost, *unread])
            comparison = with_provenance(comparison, slowest_s(comparison))
            trial = by_name[one.name]
            found[one.name] = _row(trial, comparison)
            if out is None:
                shutil.rmtree(folder / one.folder, ignore_errors=True)
            else:
                report_folder.write_reports(comparison, out / one.folder)
            if fail_fast and not found[one.name].passed:
                break
    left_out = f"--fail-fast: {next(reversed(found), '')} was not found and named"
    return tuple(
        found.get(trial.planned.name) or _not_planted(trial, left_out) if trial.planned else _not_planted(trial)
        for trial in trials
    )


def plan_of(trials: Sequence[Trial]) -> SuitePlan:
    """Return the trials as a suite."""
    cases = tuple(trial.planned for trial in trials if trial.planned is not None)
    limits = [one.plan.limits for one in cases if one.plan is not None]
    fewest = min((one.at_once for one in limits if one.at_once is not None), default=None)
    shared = dataclasses.replace(limits[0], at_once=fewest, cases_at_once=_at_once(cases))
    return SuitePlan(name="drill", cases=cases, limits=shared)


def _at_once(cases: Sequence[PlannedCase]) -> int:
    """Return how many trials run side by side."""
    plans = [one.plan for one in cases if one.plan is not None]
    on_cpu = all(info.spec.is_cpu for plan in plans for info in plan.devices)
    if not on_cpu or any(plan.limits.threads is not None for plan in plans):
        return 1
    fit = that_fit(budget_of(plans[0].case, plans[0].devices))
    return max(1, TRIALS_AT_ONCE if fit is None else min(TRIALS_AT_ONCE, fit))


def _has_reports(folder: Path) -> bool:
    return any(folder.glob("*/report.json"))


def _devices(given: Sequence[str], *, two: bool) -> tuple[DeviceInfo, ...]:
    """Return the devices of a run; the last one gets the fault, and is the reference only where there is no other.

    Of `auto` that is the reference and one more. Where a fault needs two accelerators the second gets it: PEFT goes
    through the first by default.
    """
    found = select(given)
    if two:
        return (found[0], accelerators()[1])
    plain = [info for info in found if info.spec.is_cpu and info.spec.variant is None]
    found = (*plain, *(info for info in found if info not in plain))
    return found[:2] if tuple(given) == ("auto",) else found


def _not_planted(trial: Trial, why: str = "") -> DrillRow:
    fault = trial.fault
    return DrillRow(
        fault=fault.name,
        case=fault.case,
        worker=trial.worker,
        expected=trial.expected,
        named=None,
        found=False,
        message=why or trial.why_not,
        planted=False,
    )


def _row(trial: Trial, comparison: Comparison) -> DrillRow:
    # the words are part of the name: one kind can have several causes
    fault, worker = trial.fault, trial.worker
    notes = {fault.expected} if fault.is_note else set()
    told = [f for f in comparison.findings if f.severity != "note" or f.kind in notes]
    about = [f for f in told if not _is_known(f, trial.known)]
    first = next((f for f in about if f.workers == (worker,) and re.search(fault.words, f.message)), None)
    untaken = _untaken(fault, comparison)
    if first is None and untaken:
        return _not_planted(trial, untaken)
    lacks_cause = first is not None and trial.may_lack_cause and first.kind == fault.without_form
    return DrillRow(
        fault=fault.name,
        case=fault.case,
        worker=worker,
        expected=trial.expected if first is None or not lacks_cause else first.kind,
        named=None if first is None else first.kind,
        found=first is not None and all(f.workers == (worker,) for f in about),
        message="" if first is None else first.message,
    )


def _untaken(fault: Fault, comparison: Comparison) -> str:
    """Return why a load path that a fault is in was not taken, empty where all were."""
    for load_path in fault.load_paths or ():
        rows = [row for one in comparison.tensors if one.load_path == load_path for row in one.outcomes]
        reason = next((row.reason for row in rows if row.reason), "")
        if reason and all(row.status == "skipped" for row in rows):
            return f"load path {load_path}: {reason}"
    return ""
