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
from consistency.workflows.past import opened_past
from consistency.workflows.pipeline import Plan
from consistency.workflows.suite import PlannedCase


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionCase:
    """One case of a session."""

    number: int  # among the cases of the session
    name: str
    plan: Plan | None = None  # none where the input of the case cannot be used
    error: ConsistencyError | None = None  # why it cannot be used
    places: tuple[Place, ...] = ()
    workers: tuple[WorkerPlan, ...] = ()

    @classmethod
    def of(cls, number: int, plan: Plan) -> SessionCase:
        """Return a case with the places of its items, from headers alone."""
        workers = tuple(worker for wave in plan_waves(plan.case, plan.devices) for worker in wave)
        return cls(number=number, name=plan.case.name, plan=plan, places=places(plan.case), workers=workers)

    @classmethod
    def of_suite(cls, number: int, planned: PlannedCase) -> SessionCase:
        """Return a case of a suite, which may have no plan."""
        if planned.plan is None:
            return cls(number=number, name=planned.name, error=planned.error)
        return cls.of(number, planned.plan)

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
        chosen_places = {place for place, _ in selected}
        chosen_workers = [worker for _, worker in selected]
        names = {worker.name for worker in chosen_workers}
        maker = next(worker for worker in self.workers if worker.makes_reference)
        taken = {r for w in chosen_workers if not w.info.spec.is_cpu for r in (w.load_path, *w.alternative_paths)}
        taken = taken or {r for w in chosen_workers for r in (LoadPath.ISOLATED, *w.alternative_paths)}
        whole = len(selected) == len(self.places) * len(self.workers)
        return dataclasses.replace(
            plan,
            case=msgspec.structs.replace(
                plan.case,
                stages=tuple(s for s in plan.case.stages if any(place.stage is s for place in chosen_places)),
                load_paths=tuple(r for r in LoadPath if r in taken),
                only=() if whole else tuple(sorted({_prefix(place) for place in chosen_places})),
            ),
            devices=tuple(i for i in plan.devices if i.spec.name in names or i is maker.info),
        )


def _prefix(place: Place) -> str:
    # a layer of the base may have another name in its file than in the model, so that stage is checked as a whole
    if place.is_rest or place.stage == standard.BASE:
        return place.stage
    return f"{place.stage}::{place.layer}"


_ARGUMENT = "consistency::"
_COMPARISON, _ERROR, _STARTED, _RESULT = "comparison.json", "error.json", "started", "result.json"
_LAYERS = "layers.json"
_MOST_CASES = 5  # whose layers fit a screen


class LostWorkerError(ConsistencyError):
    """The worker of a device was lost, so there is nothing to compare; `stack` is where it was."""

    def __init__(self, what: str, stack: str | None = None) -> None:
        super().__init__(what)
        self.stack = stack

    def __str__(self) -> str:
        return super().__str__() + (f"\n\n{clean(self.stack)}" if self.stack else "")


@dataclass(slots=True)
class _Read:
    """The comparison that was read last: those of a hundred cases would not fit in memory."""

    case: SessionCase
    comparison: Comparison
    finder: RowFinder


@dataclass(slots=True, kw_only=True)
class Session:
    """The cases of a pytest session, the items selected from them, and their one run.

    The controller and its workers share `folder`; without `consistency::…` in `arguments`, every item is made.
    """

    name: str
    cases: tuple[SessionCase, ...]
    plan: suite.SuitePlan | None  # of a suite; None where the options describe a single case
    given: Given
    folder: Path
    is_controller: bool
    arguments: tuple[str, ...] = ()
    alone: bool = False
    # the cases that items need, each with the places and workers of those about a device
    selected: Mapping[SessionCase, Sequence[tuple[Place, WorkerPlan]]] = field(default_factory=dict)
    # of lost workers that an item has shown: there are as many items as tensors
    stacks: set[str | None] = field(default_factory=set)
    _scratch: ExitStack = field(default_factory=ExitStack, repr=False)
    _last: _Read | None = field(default=None, repr=False)
    _failures: dict[SessionCase, ConsistencyError] = field(default_factory=dict)

    @classmethod
    def of(cls, config: pytest.Config, folder: Path | None = None) -> Session:
        """Make the session from the options, and check the case before anything is collected.

        `folder` is shared by the session's processes; without it, one is made, or is the controller's.
        """
        worker = getattr(config, "workerinput", {}).get("consistency")
        given = read_given(config)
        opened_past(None, given.baseline)  # one that cannot be read is told before anything is collected
        options = gather_suite(given.file, given.options, Edge.PYTEST)
        planned = None if options is None else suite.prepare_suite(options)
        if planned is None:
            own = gather_options(given.file, given.options, Edge.PYTEST)
            cases = [SessionCase.of(0, pipeline.prepare(own))]
        else:
            cases = [SessionCase.of_suite(number, one) for number, one in enumerate(planned.cases)]
        scratch = ExitStack()
        if folder is None:
            folder = Path(worker["folder"]) if worker else scratch.enter_context(scratch_folder("pytest"))
        return cls(
            name=cases[0].name if planned is None else planned.name,
            cases=tuple(cases),
            plan=planned,
            given=given,
            folder=folder,
            is_controller=worker is None,
            arguments=tuple(worker["arguments"]) if worker else (),
            alone=worker is not None and worker["alone"],
            _scratch=scratch,
        )

    @property
    def devices(self) -> list[str]:
        """Return the names of the devices, each once, marked where they are simulated."""
        plans = [case.plan for case in self.cases if case.plan is not None]
        names = (info.spec.name + (" (simulated)" if info.simulated else "") for plan in plans for info in plan.devices)
        return list(dict.fromkeys(names))

    @property
    def headline(self) -> str:
        first = self.cases[0].plan
        what = [counted(len(self.cases), "case")]
        if first is not None and len(self.cases) == 1:
            case = first.case
            profile = [] if case.is_pinned else [f"profile {case.profile}"]
            what = [case.dtype, *profile, *map(str, case.settings)]
        return one_line(", ".join([self.name, *what, f"on {', '.join(self.devices) or 'no device'}"]))

    def take_arguments(self, config: pytest.Config, *, items_alone: bool) -> None:
        """Take `consistency::…` from the arguments.

        Where there is no other argument, only the plugin's items are collected, if `items_alone` or one was named.
        """
        if self.is_controller:
            own = tuple(a for a in config.args if a.startswith(_ARGUMENT))
            others = [a for a in config.args if not a.startswith(_ARGUMENT)]
            given = config.args_source is pytest.Config.ArgsSource.ARGS
            self.arguments = own
            self.alone = not others or (items_alone and not given)
            config.args[:] = [] if self.alone else others
        elif self.alone:
            config.args[:] = []

    def to_worker(self) -> dict[str, Any]:
        """Return the part of the session that an xdist worker needs."""
        return {"folder": str(self.folder), "arguments": list(self.arguments), "alone": self.alone}

    def comparison(self, case: SessionCase) -> Comparison:
        """Return the comparison of a case; run the devices if nobody has yet.

        Raises
        ------
        ConsistencyError
            The case could not be checked.
        """
        return self._reading(case).comparison

    def comparisons(self) -> Mapping[str, Comparison]:
        """Return the comparisons of the cases by name, each read when it is asked for."""
        return _Comparisons(self)

    def rows(self, case: SessionCase) -> RowFinder:
        """Return the rows of the comparison of a case by place."""
        return self._reading(case).finder

    def accepted(self, case: SessionCase, tensor: TensorComparison, row: Outcome) -> str | None:
        """Return the message of the finding by which the baseline accepts a mismatch; None where it does not."""
        findings = [
            finding
            for finding in self._reading(case).comparison.findings
            if row.workers[0] in finding.workers
            and tensor.name in finding.tensors
            and (not finding.load_paths or tensor.load_path in finding.load_paths)
        ]
        if not findings or any(finding.severity == "error" for finding in findings):
            return None
        return next((finding.message for finding in findings if finding.accepted is not None), None)

    def result(self) -> SuiteResult | None:
        """Return what is kept of each case that was run, None where nothing was."""
        path = self.folder / _RESULT
        return decode_json(path.read_bytes(), SuiteResult) if path.exists() else None

    def summary(self) -> Iterator[str]:
        """Yield the verdict as a sentence, and which of the user's tolerances were applied."""
        found = self.result()
        if found is None:
            return
        text = found.sentence if len(self.cases) > 1 else found.cases[0].headline
        yield one_line(f"{found.verdict}: {text}")
        for note in common_findings(found.cases) if len(self.cases) > 1 else found.cases[0].findings:
            if note.kind == kinds.TOLERANCE:
                yield f"note: {one_line(note.message)}"
        if self.given.baseline is not None and not self.given.baseline.exists():
            yield f"note: baseline {self.given.baseline} does not exist: no finding is accepted"

    def layers(self) -> Iterator[tuple[str, str]]:
        """Yield a line per architecture and stage with its worst layer, each with the status of that.

        Of a suite, those of the first cases that are not consistent, and of others where there is room.
        """
        found = self.result()
        verdicts = {} if found is None else {case.name: case.verdict for case in found.cases}
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

    def _reading(self, case: SessionCase) -> _Read:
        if case in self._failures:
            raise self._failures[case].with_traceback(None)  # it would grow with each item
        if self._last is None or self._last.case is not case:
            from filelock import FileLock

            try:
                with FileLock(self.folder / "lock"):
                    if not (self.folder / _STARTED).exists():
                        self._make()
                    found = self._read(case)
            except ConsistencyError as error:
                self._failures[case] = error
                raise
            if found is None:
                raise CaptureError("the case was not run", where=case.name)
            self._last = _Read(case, found, RowFinder(found, case.places))
        return self._last

    def _read(self, case: SessionCase) -> Comparison | None:
        """Return the comparison that a process of the pytest session made, or raise its error."""
        home = self._home(case)
        for place in (self.folder, home):
            raise_error(place / _ERROR)
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

    def _run(self, chosen: Mapping[SessionCase, Sequence[tuple[Place, WorkerPlan]]]) -> SuiteResult:
        past = opened_past(self.given.history, self.given.baseline)
        if self.plan is None:
            ((case, selected),) = chosen.items()
            report = pipeline.run(
                case.narrowed(selected),
                self.given.out,
                watch=_unwatched,
                replace=True,
                past=past,
            )
            self._keep(case, report.comparison)
            only = summarize(case.name, ".", report.comparison, report.elapsed_s)
            return SuiteResult(
                name=self.name, cases=(only,), elapsed_s=report.elapsed_s, host=origin.host(), command=origin.command()
            )
        of = {case.name: case for case in chosen}
        cases = [one for one in self.plan.cases if one.name in of]
        narrowed = [
            one if one.plan is None else dataclasses.replace(one, plan=of[one.name].narrowed(chosen[of[one.name]]))
            for one in cases
        ]
        found = suite.run_suite(
            dataclasses.replace(self.plan, cases=tuple(narrowed)),
            self.given.out,
            watch=_unwatched,
            replace=True,
            past=past,
            each=lambda name, comparison: self._keep(of[name], comparison),
        )
        for result in found.cases:
            if result.error is not None:
                self._put(of[result.name], _ERROR, ConsistencyError(result.error).parts)
        return found

    def _keep(self, case: SessionCase, comparison: Comparison) -> None:
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
