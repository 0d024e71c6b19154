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
from consistency.launch.engine import LOCAL, Captured, CaseTask, Limits, Task, Watcher, engine
from consistency.report.formats import Chosen, View, formats
from consistency.report.summarize import summarize
from consistency.workflows import judging, pipeline, report_folder
from consistency.workflows.past import NO_PAST, Past, PastOfSuite, resolved
from consistency.workflows.planning import budgets_of, cases_at_once


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCase:
    """One case: its plan, or why it cannot be checked; its folder is `below` that of the suite."""

    options: Options
    plan: pipeline.Plan | None = None
    error: ConsistencyError | None = None
    below: str = CASES

    @property
    def name(self) -> str:
        return str(self.options.name)

    @property
    def folder(self) -> str:
        """Return where its report and captures are, relative to the suite's."""
        return str(PurePosixPath(self.below, folder_name(self.name)))

    def with_faults(self, faults: Mapping[str, str]) -> PlannedCase:
        """Return this case with faults to plant, as `Plan` has them; one that cannot be checked stays as it is."""
        if self.plan is None:
            return self
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, faults=faults))


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """Cases in the order of their report, and what they share."""

    name: str
    cases: tuple[PlannedCase, ...]
    limits: Limits
    engine: str = LOCAL

    def with_faults(self, faults: Mapping[str, Mapping[str, str]]) -> SuitePlan:
        """Return this plan with faults to plant, by name of the case."""
        cases = tuple(one.with_faults(faults.get(one.name, {})) for one in self.cases)
        return dataclasses.replace(self, cases=cases)

    def check_place(self, out: Path | None) -> None:
        """Raise UsageError where the folder for the results is inside that of a case's weights."""
        if out is not None:
            for one in self.cases:
                if one.plan is not None:
                    report_folder.refuse_among_weights(out, *report_folder.folders_of(one.plan.case))


def prepare_suite(suite: SuiteOptions) -> SuitePlan:
    """Check everything that can be checked before a worker starts; a case whose files are wrong does not stop others.

    Raises
    ------
    UsageError
        The suite has no such device.
    """
    with suite.shared.source.naming():
        devices = select(suite.shared.devices)
    budgets = budgets_of(suite, devices)
    cases: list[PlannedCase] = []
    for options in suite.cases:
        found = budgets[str(options.name)]
        error = found.refusal if isinstance(found, Budget) else found
        error = error and options.source.reword(error)
        plan = pipeline.plan_within(found, suite.shared, devices) if isinstance(found, Budget) and not error else None
        cases.append(PlannedCase(options=options, plan=plan, error=error))
    plans = [one.plan for one in cases if one.plan is not None]
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
    return {one.name: one.plan.stages for one in plan.cases if one.plan is not None}


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
        Called with the name of each case that was compared, and its comparison, of which nothing is kept afterwards.
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
        results = {one.name: _of_error(one, one.error) for one in plan.cases if one.error is not None}
        for one, captures in ended:
            results[one.name] = _finish(one, captures, folder, past, entry, each)
            if out is None:
                shutil.rmtree(folder / one.folder, ignore_errors=True)
            if fail_fast and results[one.name].verdict != "consistent":
                ended.close()
                left = (other for other in plan.cases if other.name not in results)
                results |= {other.name: _of_error(other, _left_out(one)) for other in left}
        suite = SuiteResult(
            host=origin.host(),
            command=origin.command(),
            name=plan.name,
            cases=tuple(results[one.name] for one in plan.cases),
            elapsed_s=time.monotonic() - started,
        )
        suite = write_suite(suite, out)
        return suite if entry is None else entry.commit(suite, report=resolved(out))


def capture_suite(
    plan: SuitePlan, out: Path, *, watch: Watcher, replace: bool = False, fail_fast: bool = False
) -> dict[str, tuple[WorkerCapture, ...] | ConsistencyError]:
    """Leave a capture of every case at `cases/NAME` in a folder; return what its workers left, or why there is none.

    With `fail_fast`, there is none of the cases after the first that lost a worker, or whose input cannot be used.
    """
    found: dict[str, tuple[WorkerCapture, ...] | ConsistencyError]
    found = {one.name: one.error for one in plan.cases if one.error is not None}
    plan.check_place(out)
    with suite_output(out, replace=replace) as folder, closing(captured(plan, folder, "", watch=watch)) as ended:
        for one, captures in ended:
            workers = [worker for path in captures.captures for worker in read_capture(path).workers]
            found[one.name] = captures.error or tuple(workers)
            if fail_fast and (captures.error or any(worker.info.status != "ok" for worker in workers)):
                ended.close()
                found = {other.name: _left_out(one) for other in plan.cases} | found
    return {one.name: found[one.name] for one in plan.cases}


def captured(
    plan: SuitePlan, folder: Path, below: str, *, watch: Watcher, replace: bool = False
) -> Generator[tuple[PlannedCase, Captured]]:
    """Yield each case with its captures when the last of its workers has ended; `below` its folder are the captures."""
    of: dict[Path, PlannedCase] = {}
    tasks: list[CaseTask] = []
    for one in _in_turn(plan.cases):
        assert one.plan is not None
        task = pipeline.task_of(one.plan, folder / one.folder / below)
        tasks.append(task)
        of[task.target] = one
    if not tasks:
        return
    whole = Task(cases=tasks, limits=plan.limits)
    with closing(engine(plan.engine).capture(whole, watch=watch, replace=replace)) as found:
        for captures in found:
            yield of[captures.task.target], captures


def _finish(
    one: PlannedCase,
    captured: Captured,
    folder: Path,
    past: Past,
    entry: PastOfSuite | None,
    each: Callable[[str, Comparison], None],
) -> CaseResult:
    """Compare a case, write its report, and return what is kept of it."""
    if captured.error is not None:
        return _of_error(one, captured.error)
    try:
        captures, unread = judging.read_captures(captured.captures)
        comparison = judging.compare_captures(captures, unread=[*captured.lost, *unread])
    except ConsistencyError as error:
        return _of_error(one, error)
    comparison = past.accepted(comparison) if entry is None else entry.add(one.name, captures, comparison)
    comparison = with_provenance(comparison, slowest_s(comparison))
    comparison = report_folder.write_reports(comparison, folder / one.folder)
    each(one.name, comparison)
    return summarize(one.name, one.folder, comparison, slowest_s(comparison))


def write_suite(suite: SuiteResult, out: Path | None) -> SuiteResult:
    """Write the files of a suite's own report to a folder; return the suite with what cannot be written."""
    if out is None:
        return suite
    view = View(elapsed_s=suite.elapsed_s, folder=str(out))
    texts = report_folder.write_all(out, formats(Chosen.OUT, of_suite=True), suite, view)
    return msgspec.structs.replace(suite, unwritten=tuple(texts))


def slowest_s(comparison: Comparison) -> float:
    """Return the time of the worker that took longest: workers run side by side, and a case never exceeds its suite."""
    return max((worker.elapsed_s for worker in comparison.workers), default=0.0)


def _of_error(one: PlannedCase, error: ConsistencyError) -> CaseResult:
    options = one.options
    return CaseResult.of_error(
        one.name, one.folder, error, base=options.base or "", adapter=options.adapter, dtype=options.dtype
    )


def _left_out(stopped_by: PlannedCase) -> UsageError:
    return UsageError(f"left out by --fail-fast after case {stopped_by.name}")


def _in_turn(cases: Iterable[PlannedCase]) -> list[PlannedCase]:
    """Return the cases that can be checked, those with the same base one after the other: it is loaded once."""
    planned = [one for one in cases if one.plan is not None]
    first: dict[object, int] = {}
    for number, one in enumerate(planned):
        first.setdefault(_base_key(one), number)
    return sorted(planned, key=lambda one: first[_base_key(one)])


def _base_key(one: PlannedCase) -> object:
    assert one.plan is not None
    case = one.plan.case
    return case.process_key, case.base, case.dtype, case.allow_pickle, case.trust_remote_code


@contextmanager
def suite_output(out: Path | None, *, replace: bool, reads: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield the folder to write into, without the cases of an earlier suite; `reads` are folders that are read."""
    if out is not None:
        cases = (out / CASES).resolve()
        inside = next((folder for folder in reads if folder.resolve().is_relative_to(cases)), None)
        if inside is not None:
            hint = "choose another folder"
            raise CaptureError("--out holds a folder that is compared", where=out, got=inside, hint=hint)

    def has_complete_cases(folder: Path) -> bool:
        return any((folder / CASES).glob("*/report.json")) or any((folder / CASES).glob(f"*/{MANIFEST}"))

    writes = (*(row.name for row in formats(Chosen.OUT, of_suite=True)), CASES)
    with report_folder.output(out, replace=replace, reads=reads, writes=writes, keeps=has_complete_cases) as folder:
        report_folder.remove_reports(folder, of_suite=True)  # first: it states the verdict of cases that are removed
        shutil.rmtree(folder / CASES, ignore_errors=True)
        yield folder
