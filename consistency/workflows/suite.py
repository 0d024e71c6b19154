"""A suite: many cases, one set of workers; each case has the report of a run, and all together one of their own.

A case is compared and written as soon as its last worker has ended it, while the workers go on with the next one, and
only a summary of it is kept.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from consistency.capture import origin
from consistency.capture.folder import CASES, MANIFEST, WorkerCapture
from consistency.capture.reader import read_capture
from consistency.case.budget.fit import Budget
from consistency.case.options import Options
from consistency.case.suite import SuiteOptions, folder_name
from consistency.comparison.result import Comparison, with_provenance
from consistency.comparison.suite import CaseResult, SuiteResult
from consistency.devices.discovery import select
from consistency.errors import CaptureError, ConsistencyError, UsageError
from consistency.launch.scheduler import LOCAL, Captured, CaseTask, Limits, Task, Watcher, make_scheduler
from consistency.report.formats import Chosen, View, formats
from consistency.report.summarize import summarize
from consistency.workflows import judging, pipeline, report_folder
from consistency.workflows.past import NO_PAST, Past, PastOfSuite, held_against, resolved
from consistency.workflows.planning import budgets_of, cases_at_once


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCase:
    """One case of a suite, planned."""

    options: Options
    plan: pipeline.Plan | None = None
    """The plan of the case; None where it cannot be checked."""
    error: ConsistencyError | None = None
    """Why the case cannot be checked."""
    below: str = CASES
    """The folder of its own folder, relative to the suite's."""

    @property
    def name(self) -> str:
        """The name of the case."""
        return str(self.options.name)

    @property
    def folder(self) -> str:
        """The folder of the case's report and captures, relative to the suite's."""
        return str(PurePosixPath(self.below, folder_name(self.name)))

    def with_faults(self, faults: Mapping[str, str]) -> PlannedCase:
        """Return this case with faults to plant, as `Plan` has them; one that cannot be checked stays as it is."""
        if self.plan is None:
            return self
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, faults=faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """The plan of a suite: cases in the order of their report, and the limits that they share."""

    name: str
    cases: tuple[PlannedCase, ...]
    limits: Limits
    scheduler: str = LOCAL

    def with_faults(self, faults: Mapping[str, Mapping[str, str]]) -> SuitePlan:
        """Return this plan with faults to plant, by name of the case."""
        cases = tuple(case.with_faults(faults.get(case.name, {})) for case in self.cases)
        return dataclasses.replace(self, cases=cases)

    def check_place(self, out: Path | None) -> None:
        """Raise UsageError where the folder for the results is inside a folder of a case's weights."""
        if out is None:
            return
        for case in self.cases:
            if case.plan is not None:
                report_folder.refuse_among_weights(out, *report_folder.folders_of(case.plan.case))


def prepare_suite(suite: SuiteOptions) -> SuitePlan:
    """Check everything that can be checked before a worker starts; a case whose files are wrong does not stop others.

    Raises
    ------
    UsageError
        The suite has no such device.
    """
    # an error names the option as the user has written it
    with suite.shared.source.naming():
        devices = select(suite.shared.devices)
    budgets = budgets_of(suite, devices)
    cases: list[PlannedCase] = []
    for options in suite.cases:
        budget = budgets[str(options.name)]
        error = budget.refusal if isinstance(budget, Budget) else budget
        if error is not None:
            error = options.source.reword(error)
        plan = None
        if isinstance(budget, Budget) and error is None:
            plan = pipeline.plan_within(budget, suite.shared, devices)
        cases.append(PlannedCase(options=options, plan=plan, error=error))
    plans = [case.plan for case in cases if case.plan is not None]
    # the workers of all cases run in the same waves, so the case that needs most memory limits them
    fewest = min((plan.limits.at_once for plan in plans if plan.limits.at_once is not None), default=None)
    shared = suite.shared
    limits = Limits(
        timeout_s=shared.timeout,
        stall_s=shared.stall,
        threads=shared.threads,
        at_once=fewest,
        cases_at_once=cases_at_once(suite, devices, budgets),
    )
    return SuitePlan(name=suite.name, cases=tuple(cases), limits=limits)


def expected(plan: SuitePlan) -> Mapping[str, Mapping[str, Sequence[tuple[str, float]]]]:
    """Return the stages of the workers by the name of the case, for a display of the progress."""
    return {case.name: case.plan.stages for case in plan.cases if case.plan is not None}


def run_suite(
    plan: SuitePlan,
    out: Path | None,
    *,
    watch: Watcher,
    replace: bool = False,
    past: Past = NO_PAST,
    each: Callable[[str, Comparison], None] = lambda _name, _comparison: None,
    fail_fast: bool = False,
) -> SuiteResult:
    """Capture, compare and report every case, and the suite.

    The other parameters are those of `pipeline.run`; `out` gets `cases/NAME/`, each with what a run leaves, and the
    suite's own files. A suite that is stopped leaves the cases that were complete.

    Parameters
    ----------
    each : callable
        Called with the name and the comparison of each case that was compared; the comparison is not kept afterwards.
    fail_fast : bool
        Leave the other cases unchecked as soon as one is not consistent.
    """
    started = time.monotonic()
    entry = past.suite_entry()
    plan.check_place(out)
    with (
        suite_output(out, replace=replace) as folder,
        past.noted(plan.name, out),
        closing(captured(plan, folder, report_folder.CAPTURES, watch=watch)) as ended,
    ):
        results = {case.name: _result_of_error(case, case.error) for case in plan.cases if case.error is not None}
        for case, captures in ended:
            results[case.name] = _finish(case, captures, folder, past, entry, each)
            # nothing is to be kept, so the disk need not hold more than one case
            if out is None:
                shutil.rmtree(folder / case.folder, ignore_errors=True)
            if fail_fast and results[case.name].verdict != "consistent":
                ended.close()  # ends the workers, which are at other cases
                unchecked = [other for other in plan.cases if other.name not in results]
                results |= {other.name: _result_of_error(other, _left_out(case)) for other in unchecked}
        suite = SuiteResult(
            host=origin.host(),
            command=origin.command(),
            name=plan.name,
            cases=tuple(results[case.name] for case in plan.cases),
            elapsed_s=time.monotonic() - started,
        )
        suite = write_suite(suite, out)
        return suite if entry is None else entry.commit(suite, report=resolved(out))


def capture_suite(
    plan: SuitePlan, out: Path, *, watch: Watcher, replace: bool = False, fail_fast: bool = False
) -> dict[str, tuple[WorkerCapture, ...] | ConsistencyError]:
    """Leave a capture of every case at `cases/NAME` in a folder; return its workers by case, or why it has none.

    With `fail_fast`, there is no capture of the cases after the first that lost a worker, or whose input cannot be
    used.
    """
    results: dict[str, tuple[WorkerCapture, ...] | ConsistencyError]
    results = {case.name: case.error for case in plan.cases if case.error is not None}
    plan.check_place(out)
    with (
        suite_output(out, replace=replace) as folder,
        closing(captured(plan, folder, "", watch=watch)) as ended,
    ):
        for case, captures in ended:
            workers: list[WorkerCapture] = []
            for path in captures.captures:
                workers += read_capture(path).workers
            results[case.name] = captures.error or tuple(workers)
            has_failed = captures.error is not None or any(worker.info.status != "ok" for worker in workers)
            if fail_fast and has_failed:
                ended.close()
                results = {other.name: _left_out(case) for other in plan.cases} | results
    return {case.name: results[case.name] for case in plan.cases}


def captured(
    plan: SuitePlan, folder: Path, below: str, *, watch: Watcher, replace: bool = False
) -> Generator[tuple[PlannedCase, Captured]]:
    """Yield each case with its captures when the last of its workers has ended.

    Parameters
    ----------
    folder : Path
        The folder of the suite.
    below : str
        Folder of the captures, relative to that of their case.
    """
    case_by_target: dict[Path, PlannedCase] = {}
    tasks: list[CaseTask] = []
    for case in _in_turn(plan.cases):
        assert case.plan is not None
        task = pipeline.task_of(case.plan, folder / case.folder / below)
        tasks.append(task)
        case_by_target[task.target] = case
    if not tasks:
        return
    suite_task = Task(cases=tasks, limits=plan.limits)
    with closing(make_scheduler(plan.scheduler).capture(suite_task, watch=watch, replace=replace)) as ended:
        for captures in ended:
            yield case_by_target[captures.task.target], captures


def _finish(
    case: PlannedCase,
    captured: Captured,
    folder: Path,
    past: Past,
    entry: PastOfSuite | None,
    each: Callable[[str, Comparison], None],
) -> CaseResult:
    """Compare a case, write its report, and return its summary."""
    if captured.error is not None:
        return _result_of_error(case, captured.error)
    try:
        captures, unread = judging.read_captures(captured.captures)
        comparison = judging.compare_captures(captures, unread=[*captured.lost, *unread])
    except ConsistencyError as error:
        return _result_of_error(case, error)
    comparison = held_against(past, entry, case.name, captures, comparison)
    comparison = with_provenance(comparison, slowest_s(comparison))
    comparison = report_folder.write_reports(comparison, folder / case.folder)
    each(case.name, comparison)
    return summarize(case.name, case.folder, comparison, slowest_s(comparison))


def write_suite(suite: SuiteResult, out: Path | None) -> SuiteResult:
    """Write the files of a suite's own report to a folder; return the suite with the files that cannot be written."""
    if out is None:
        return suite
    view = View(elapsed_s=suite.elapsed_s, folder=str(out))
    texts = report_folder.write_all(out, formats(Chosen.OUT, of_suite=True), suite, view)
    return msgspec.structs.replace(suite, unwritten=tuple(texts))


def slowest_s(comparison: Comparison) -> float:
    """Return the time of the worker that took longest: workers run side by side, and a case never exceeds its suite."""
    return max((worker.elapsed_s for worker in comparison.workers), default=0.0)


def _result_of_error(case: PlannedCase, error: ConsistencyError) -> CaseResult:
    """Return the result of a case that could not be checked."""
    options = case.options
    return CaseResult.of_error(
        case.name, case.folder, error, base=options.base or "", adapter=options.adapter, dtype=options.dtype
    )


def _left_out(stopped_by: PlannedCase) -> UsageError:
    return UsageError(f"left out by --fail-fast after case {stopped_by.name}")


def _in_turn(cases: Iterable[PlannedCase]) -> list[PlannedCase]:
    """Return the cases that can be checked, those with the same base one after the other: it is loaded once."""
    planned = [case for case in cases if case.plan is not None]
    first_with_base: dict[object, int] = {}
    for number, case in enumerate(planned):
        first_with_base.setdefault(_base_key(case), number)
    return sorted(planned, key=lambda case: first_with_base[_base_key(case)])


def _base_key(planned: PlannedCase) -> object:
    """Return what cases that load the same base in the same way have in common."""
    assert planned.plan is not None
    case = planned.plan.case
    return case.process_key, case.base, case.dtype, case.allow_pickle, case.trust_remote_code


@contextmanager
def suite_output(out: Path | None, *, replace: bool, reads: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield the folder to write into, without the cases of an earlier suite; `reads` are folders that are read.

    Raises
    ------
    CaptureError
        As for `report_folder.output`, or a folder that is read would be removed with the earlier cases.
    """
    if out is not None:
        cases = (out / CASES).resolve()
        read_inside = next((folder for folder in reads if folder.resolve().is_relative_to(cases)), None)
        if read_inside is not None:
            hint = "choose another folder"
            raise CaptureError("--out holds a folder that is compared", where=out, got=read_inside, hint=hint)

    def has_complete_cases(folder: Path) -> bool:
        return any((folder / CASES).glob("*/report.json")) or any((folder / CASES).glob(f"*/{MANIFEST}"))

    writes = (*(row.name for row in formats(Chosen.OUT, of_suite=True)), CASES)
    with report_folder.output(out, replace=replace, reads=reads, writes=writes, keeps=has_complete_cases) as folder:
        report_folder.remove_reports(folder, of_suite=True)  # first: it states the verdict of cases that are removed
        shutil.rmtree(folder / CASES, ignore_errors=True)
        yield folder
