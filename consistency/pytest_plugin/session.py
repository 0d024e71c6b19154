"""One pytest session's run: made once, under a lock, for the controller and all of its xdist workers.

The process that needs a comparison first runs the devices, for all selected cases; all others wait for the lock and
read its results.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.capture import origin
from consistency.capture.claim import scratch_folder
from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.wording import counted
from consistency.case import standard
from consistency.case.load_path import LoadPath
from consistency.case.options import Edge
from consistency.case.reading import gather_options
from consistency.case.suite import gather_suite
from consistency.comparison import kinds
from consistency.comparison.layers import layers_of
from consistency.comparison.result import Comparison, Outcome, TensorComparison
from consistency.comparison.suite import SuiteResult, common_findings
from consistency.errors import CaptureError, ConsistencyError
from consistency.launch.plan import WorkerPlan, plan_waves
from consistency.pytest_plugin.failures import leaving_its_error, raise_error
from consistency.pytest_plugin.given import Given, read_given
from consistency.pytest_plugin.item_names import Place, RowFinder, places
from consistency.report.layers import summary_lines
from consistency.report.summarize import summarize
from consistency.text import clean, one_line
from consistency.worker.protocol import Event
from consistency.workflows import pipeline, suite
from consistency.workflows.past import Past, opened_past
from consistency.workflows.pipeline import Plan
from consistency.workflows.suite import PlannedCase


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionCase:
    """One case of a session."""

    number: int  # index among the cases of the session
    name: str
    plan: Plan | None = None  # None where the input of the case cannot be used
    error: ConsistencyError | None = None  # why it cannot be used
    places: tuple[Place, ...] = ()
    workers: tuple[WorkerPlan, ...] = ()

    @classmethod
    def from_plan(cls, number: int, plan: Plan) -> SessionCase:
        """Return a case with the places of its items, from headers alone."""
        workers = tuple(worker for wave in plan_waves(plan.case, plan.devices) for worker in wave)
        return cls(number=number, name=plan.case.name, plan=plan, places=places(plan.case), workers=workers)

    @classmethod
    def from_suite(cls, number: int, planned: PlannedCase) -> SessionCase:
        """Return a case of a suite, which may have no plan."""
        if planned.plan is None:
            return cls(number=number, name=planned.name, error=planned.error)
        return cls.from_plan(number, planned.plan)

    def narrowed(self, selected: Sequence[tuple[Place, WorkerPlan]]) -> Plan:
        """Return the plan narrowed to the stages, layers and devices of the selected items; whole without any.

        Raises
        ------
        ConsistencyError
            The input of the case cannot be used.
        """
        plan = self.plan
        if plan is None:
            raise self.error or ConsistencyError("the case has no plan", where=self.name)
        if not selected:
            return plan
        selected_places = {place for place, _ in selected}
        selected_workers = [worker for _, worker in selected]
        device_names = {worker.name for worker in selected_workers}
        load_paths = _load_paths(selected_workers)
        # The device that makes the reference results is needed, whatever was selected.
        reference_maker = next(worker for worker in self.workers if worker.makes_reference)
        is_whole = len(selected) == len(self.places) * len(self.workers)
        return dataclasses.replace(
            plan,
            case=msgspec.structs.replace(
                plan.case,
                stages=tuple(s for s in plan.case.stages if any(place.stage is s for place in selected_places)),
                load_paths=tuple(load_path for load_path in LoadPath if load_path in load_paths),
                only=() if is_whole else tuple(sorted({_prefix(place) for place in selected_places})),
            ),
            devices=tuple(i for i in plan.devices if i.spec.name in device_names or i is reference_maker.info),
        )


def _load_paths(workers: Sequence[WorkerPlan]) -> set[LoadPath]:
    """Return the load paths that workers take; those of the CPU count only where there is no other device."""
    load_paths: set[LoadPath] = set()
    for worker in workers:
        if not worker.info.spec.is_cpu:
            load_paths.update((worker.load_path, *worker.alternative_paths))
    if not load_paths:
        for worker in workers:
            load_paths.update((LoadPath.ISOLATED, *worker.alternative_paths))
    return load_paths


def _prefix(place: Place) -> str:
    """Return the beginning of the names of the tensors that a place needs."""
    # A layer of the base may have another name in its file than in the model, so that stage is checked as a whole.
    if place.is_everything_else or place.stage == standard.BASE:
        return place.stage
    return f"{place.stage}::{place.layer}"


_ARGUMENT = "consistency::"  # beginning of an argument that names items of the plugin

# Files in the shared folder: `started` and `result.json` for the session, the others in the folder of each case;
# `error.json` in either.
_COMPARISON, _ERROR, _STARTED, _RESULT = "comparison.json", "error.json", "started", "result.json"
_LAYERS = "layers.json"
_MOST_CASES = 5  # whose layers fit a screen


class LostWorkerError(ConsistencyError):
    """The worker of a device was lost, so there is nothing to compare; `stack` is its stack, if that is known."""

    def __init__(self, what: str, stack: str | None = None) -> None:
        super().__init__(what)
        self.stack = stack

    def __str__(self) -> str:
        return super().__str__() + (f"\n\n{clean(self.stack)}" if self.stack else "")


@dataclass(slots=True)
class _LoadedCase:
    """The comparison that was read last: those of a hundred cases would not fit in memory."""

    case: SessionCase
    comparison: Comparison
    finder: RowFinder


@dataclass(slots=True, kw_only=True)
class Session:
    """The cases of a pytest session, the items selected from them, and their one run.

    The controller and its xdist workers share `folder`. Without `consistency::…` in `arguments`, every item is made;
    with `alone`, no files are collected beside the items.
    """

    name: str
    cases: tuple[SessionCase, ...]
    plan: suite.SuitePlan | None  # of a suite; None where the options describe a single case
    given: Given
    folder: Path
    is_controller: bool
    arguments: tuple[str, ...] = ()
    alone: bool = False
    # the cases that items need, each with the place and worker of every item of a device
    selected: Mapping[SessionCase, Sequence[tuple[Place, WorkerPlan]]] = field(default_factory=dict)
    # stacks of lost workers that an item has shown: there are as many items as tensors
    shown_stacks: set[str | None] = field(default_factory=set)
    _scratch: ExitStack = field(default_factory=ExitStack, repr=False)
    _last: _LoadedCase | None = field(default=None, repr=False)
    _failures: dict[SessionCase, ConsistencyError] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: pytest.Config, folder: Path | None = None) -> Session:
        """Make the session from the options, and check the case before anything is collected.

        `folder` is shared by the session's processes; without it, one is made, or is the controller's.
        """
        worker_input = getattr(config, "workerinput", {}).get("consistency")  # None in the controller
        given = read_given(config)
        opened_past(None, given.baseline)  # one that cannot be read is told before anything is collected
        suite_options = gather_suite(given.file, given.options, Edge.PYTEST)
        if suite_options is None:
            planned = None
            case_plan = pipeline.prepare(gather_options(given.file, given.options, Edge.PYTEST))
            cases = [SessionCase.from_plan(0, case_plan)]
            name = cases[0].name
        else:
            planned = suite.prepare_suite(suite_options)
            cases = [SessionCase.from_suite(number, case) for number, case in enumerate(planned.cases)]
            name = planned.name
        scratch = ExitStack()
        if folder is None:
            folder = Path(worker_input["folder"]) if worker_input else scratch.enter_context(scratch_folder("pytest"))
        return cls(
            name=name,
            cases=tuple(cases),
            plan=planned,
            given=given,
            folder=folder,
            is_controller=worker_input is None,
            arguments=tuple(worker_input["arguments"]) if worker_input else (),
            alone=worker_input is not None and worker_input["alone"],
            _scratch=scratch,
        )

    @property
    def devices(self) -> list[str]:
        """Return the names of the devices, each once, marked where they are simulated."""
        names: dict[str, None] = {}
        for case in self.cases:
            for info in case.plan.devices if case.plan is not None else ():
                names[f"{info.spec.name} (simulated)" if info.simulated else info.spec.name] = None
        return list(names)

    @property
    def headline(self) -> str:
        """Return the name, what is checked, and the devices, for the header of pytest."""
        texts = [self.name]
        plan = self.cases[0].plan
        if plan is not None and len(self.cases) == 1:
            case = plan.case
            texts.append(case.dtype)
            if not case.is_pinned:
                texts.append(f"profile {case.profile}")
            texts += map(str, case.settings)
        else:
            texts.append(counted(len(self.cases), "case"))
        texts.append(f"on {', '.join(self.devices) or 'no device'}")
        return one_line(", ".join(texts))

    def take_arguments(self, config: pytest.Config, *, items_alone: bool) -> None:
        """Take `consistency::…` from the arguments.

        Where there is no other argument, only the plugin's items are collected, if `items_alone` or one was named.
        """
        if self.is_controller:
            self.arguments = tuple(argument for argument in config.args if argument.startswith(_ARGUMENT))
            others = [argument for argument in config.args if not argument.startswith(_ARGUMENT)]
            # Otherwise they are pytest's own: `testpaths`, or the folder that it was started in.
            are_of_user = config.args_source is pytest.Config.ArgsSource.ARGS
            self.alone = not others or (items_alone and not are_of_user)
            config.args[:] = [] if self.alone else others
        elif self.alone:
            config.args[:] = []

    def to_worker(self) -> dict[str, Any]:
        """Return the values that an xdist worker makes the same session from."""
        return {"folder": str(self.folder), "arguments": list(self.arguments), "alone": self.alone}

    def comparison(self, case: SessionCase) -> Comparison:
        """Return the comparison of a case; run the devices if nobody has yet.

        Raises
        ------
        ConsistencyError
            The case could not be checked.
        """
        return self._load(case).comparison

    def comparisons(self) -> Mapping[str, Comparison]:
        """Return the comparisons of the cases by name, each read when it is asked for."""
        return _Comparisons(self)

    def rows(self, case: SessionCase) -> RowFinder:
        """Return the finder of rows in the comparison of a case."""
        return self._load(case).finder

    def accepted(self, case: SessionCase, tensor: TensorComparison, row: Outcome) -> str | None:
        """Return the message of the finding by which the baseline accepts a mismatch; None where it does not."""
        accepted = None
        for finding in self._load(case).comparison.findings:
            is_of_row = row.workers[0] in finding.workers and tensor.name in finding.tensors
            is_on_path = not finding.load_paths or tensor.load_path in finding.load_paths
            if not is_of_row or not is_on_path:
                continue
            if finding.severity == "error":  # also about the row, and not accepted
                return None
            if finding.accepted is not None and accepted is None:
                accepted = finding.message
        return accepted

    def result(self) -> SuiteResult | None:
        """Return the result of each case that was run; None where none was."""
        path = self.folder / _RESULT
        return decode_json(path.read_bytes(), SuiteResult) if path.exists() else None

    def summary(self) -> Iterator[str]:
        """Yield the verdict as a sentence, and which of the user's tolerances were applied."""
        result = self.result()
        if result is None:
            return
        is_suite = len(self.cases) > 1
        statement = result.sentence if is_suite else result.cases[0].headline
        yield one_line(f"{result.verdict}: {statement}")
        for finding in common_findings(result.cases) if is_suite else result.cases[0].findings:
            if finding.kind == kinds.TOLERANCE:
                yield f"note: {one_line(finding.message)}"
        if self.given.baseline is not None and not self.given.baseline.exists():
            yield f"note: baseline {self.given.baseline} does not exist: no finding is accepted"

    def layers(self) -> Iterator[tuple[str, str]]:
        """Yield the status and a line of text for the worst layer of each architecture and stage.

        A suite has lines for a few cases, first those that are not consistent.
        """
        result = self.result()
        verdicts = {} if result is None else {case.name: case.verdict for case in result.cases}
        ran = [case for case in self.cases if (self._home(case) / _LAYERS).exists()]
        ran.sort(key=lambda case: verdicts.get(case.name) == "consistent")
        for case in ran[:_MOST_CASES]:
            if len(self.cases) > 1:
                yield "", one_line(case.name)
            lines = decode_json((self._home(case) / _LAYERS).read_bytes(), list[tuple[str, str]])
            yield from ((status, one_line(text)) for status, text in lines)
        if len(ran) > _MOST_CASES:
            yield "", f"and {counted(len(ran) - _MOST_CASES, 'more case')}"

    def close(self) -> None:
        """Remove the folder that the session's processes share."""
        if self.is_controller:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._scratch.close()

    def _load(self, case: SessionCase) -> _LoadedCase:
        """Return the comparison of a case, read from its file or kept; run the devices if nobody has yet."""
        if case in self._failures:
            raise self._failures[case].with_traceback(None)  # it would grow with each item
        if self._last is None or self._last.case is not case:
            from filelock import FileLock

            try:
                with FileLock(self.folder / "lock"):
                    if not (self.folder / _STARTED).exists():
                        self._make()
                    comparison = self._read(case)
            except ConsistencyError as error:
                self._failures[case] = error
                raise
            if comparison is None:
                raise CaptureError("the case was not run", where=case.name)
            self._last = _LoadedCase(case, comparison, RowFinder(comparison, case.places))
        return self._last

    def _read(self, case: SessionCase) -> Comparison | None:
        """Return the comparison that a process of the pytest session made, or raise its error.

        None where the devices were run and this case was not among the selected ones.
        """
        home = self._home(case)
        for folder in (self.folder, home):
            raise_error(folder / _ERROR)
        if (home / _COMPARISON).exists():
            return decode_json((home / _COMPARISON).read_bytes(), Comparison)
        if (self.folder / _STARTED).exists() and not (self.folder / _RESULT).exists():
            raise CaptureError(
                "the pytest process that ran the devices died before it was done, and its workers with it",
                got=(self.folder / _STARTED).read_text(encoding="utf-8"),
                hint="run it without -n to see the error of that process",
            )
        return None

    def _make(self) -> None:
        """Run the selected cases, all of them where no item is selected."""
        (self.folder / _STARTED).write_text(f"process {os.getpid()}", encoding="utf-8")
        with leaving_its_error(self.folder / _ERROR):
            result = self._run(self.selected or dict.fromkeys(self.cases, ()))
        (self.folder / _RESULT).write_bytes(encode_json(result))

    def _run(self, selected_cases: Mapping[SessionCase, Sequence[tuple[Place, WorkerPlan]]]) -> SuiteResult:
        """Run cases, each narrowed to its selected items, and keep their comparisons for other processes."""
        past = opened_past(self.given.history, self.given.baseline)
        if self.plan is not None:
            return self._run_suite(self.plan, selected_cases, past)
        ((case, selected),) = selected_cases.items()
        report = pipeline.run(case.narrowed(selected), self.given.out, watch=_unwatched, replace=True, past=past)
        self._keep(case, report.comparison)
        return SuiteResult(
            name=self.name,
            cases=(summarize(case.name, ".", report.comparison, report.elapsed_s),),
            elapsed_s=report.elapsed_s,
            host=origin.host(),
            command=origin.command(),
        )

    def _run_suite(
        self,
        plan: suite.SuitePlan,
        selected_cases: Mapping[SessionCase, Sequence[tuple[Place, WorkerPlan]]],
        past: Past,
    ) -> SuiteResult:
        cases_by_name = {case.name: case for case in selected_cases}
        planned_cases = []
        for planned in plan.cases:
            case = cases_by_name.get(planned.name)
            if case is None:
                continue
            if planned.plan is None:  # its input cannot be used, which the suite reports
                planned_cases.append(planned)
            else:
                planned_cases.append(dataclasses.replace(planned, plan=case.narrowed(selected_cases[case])))
        result = suite.run_suite(
            dataclasses.replace(plan, cases=tuple(planned_cases)),
            self.given.out,
            watch=_unwatched,
            replace=True,
            past=past,
            each=lambda name, comparison: self._keep(cases_by_name[name], comparison),
        )
        for case_result in result.cases:
            if case_result.error is not None:
                error = ConsistencyError(case_result.error)
                self._put(cases_by_name[case_result.name], _ERROR, error.parts)
        return result

    def _keep(self, case: SessionCase, comparison: Comparison) -> None:
        """Write the comparison of a case, and its worst layers, which the summary shows without reading all of it."""
        self._put(case, _COMPARISON, comparison)
        self._put(case, _LAYERS, list(summary_lines(layers_of(comparison))))

    def _put(self, case: SessionCase, name: str, value: object) -> None:
        home = self._home(case)
        home.mkdir(exist_ok=True)
        (home / name).write_bytes(encode_json(value))

    def _home(self, case: SessionCase) -> Path:
        return self.folder / str(case.number)


class _Comparisons(Mapping[str, Comparison]):
    """The comparisons of a session's cases by name."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._cases = {case.name: case for case in session.cases}

    def __getitem__(self, name: str) -> Comparison:
        return self._session.comparison(self._cases[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._cases)

    def __len__(self) -> int:
        return len(self._cases)


def _unwatched(_name: str, _event: Event) -> None:
    """Show no progress: pytest owns the terminal."""
