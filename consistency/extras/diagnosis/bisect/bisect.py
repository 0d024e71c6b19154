"""Find the setting that explains a difference: change one at a time, rerun only the layer concerned.

Every trial is one worker on the device of the finding, with one or more settings changed before its process starts; it
is compared with a run of the reference worker. The answer is the smallest set of changes. Float64 results are made on
the CPU by the worker of the trial; where that worker's device is a kernel variant of the CPU, which the trial is to
judge, the reference worker runs beside it and makes them. In a stage whose workers form a group, every trial is the
whole group, with the settings of each rank changed. Everything else is as in the run that found the difference.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from consistency.capture.claim import scratch_folder
from consistency.capture.folder import Capture
from consistency.capture.reader import read_capture
from consistency.case import standard
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.options import Options
from consistency.case.received import received
from consistency.case.stage import Stage
from consistency.case.stages import SPECS, with_judges
from consistency.comparison.outcomes import Outcome
from consistency.comparison.records import Key
from consistency.comparison.result import BAD, TensorComparison, tensor_name
from consistency.comparison.workers import ComparedWorker, gather
from consistency.devices.backend import Backend, Variant
from consistency.devices.backends import backend_of
from consistency.devices.cores import available_cores
from consistency.devices.discovery import select
from consistency.devices.spec import parse_device
from consistency.errors import InputError, UsageError
from consistency.extras.diagnosis.reproduce.evidence import find_evidence, find_tensor
from consistency.launch.change import Change
from consistency.launch.environment import worker_environment
from consistency.launch.forked import Importers
from consistency.launch.local import LocalScheduler
from consistency.launch.plan import WorkerPlan, plan_waves
from consistency.launch.scheduler import CaseTask, Limits, Watcher, capture_case
from consistency.numerics.rules import Rule
from consistency.workflows import judging

NOT_SEEN = "the tensor was not recorded"
_JUDGED = frozenset({"equal", "within", "outside"})


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a set of changes: whether the difference is `gone` with them, or it was not tested."""

    changes: tuple[str, ...]
    gone: bool
    detail: str
    lost: bool = False  # its worker, or its stage


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What explains a difference."""

    tensor: str
    worker: str
    reference: str
    repeats: bool  # whether the difference shows again when nothing is changed
    explained_by: tuple[str, ...]  # the smallest set of changes found that removes it; empty where none does
    trials: tuple[Trial, ...]

    @property
    def sentence(self) -> str:
        """Return the answer as one sentence."""
        if not self.repeats:
            return f"{self.tensor} on {self.worker} matches when rerun with the same settings: nothing to bisect"
        if not self.explained_by:
            tried = len({change for trial in self.trials for change in trial.changes})
            return f"none of the {tried} settings explains {self.tensor} on {self.worker}, alone or together"
        return f"{self.tensor} on {self.worker} matches the reference with {' and '.join(self.explained_by)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The difference to be explained."""

    worker: ComparedWorker
    reference: ComparedWorker
    key: Key
    bad: bool  # whether its row violates its rule; otherwise it only differs bitwise from the reference worker
    is_fact: bool = False  # whether it is a fact of the worker by itself, which may be recorded only where it is wrong


def bisect(
    report: Path,
    *,
    number: int | None = None,
    tensor: str | None = None,
    worker: str | None = None,
    watch: Callable[[Trial, int], None] = lambda _trial, _most: None,
    progress: Watcher = lambda _trial, _event: None,
    faults: Mapping[str, str] | None = None,
    given: Options | None = None,
) -> Answer:
    """Find the smallest set of settings that removes a difference.

    Parameters
    ----------
    report : Path
        `report.json`, or its folder.
    number : int, optional
        Number of the finding, from 1, where there are several; or
    tensor, worker : str, optional
        `stage::layer.tensor` and the worker on which it differs bitwise from the reference worker.
    watch : callable
        Called with each trial, and how many there will be at most.
    progress : callable
        Called with the names of a trial's changes, and each event of its worker.
    faults : mapping of str to str, optional
        Faults that were planted, by device, and are planted again.
    given : Options, optional
        Base, adapter, and what may run code: what a report asks for beyond its own folder is not given to it.

    Raises
    ------
    InputError
        The report asks for what is not `given`, or no trial could be run.
    """
    with scratch_folder("bisect") as scratch, ExitStack() as stack:
        subject = _subject(report, number, tensor, worker, scratch)
        name = tensor_name(*subject.key)
        changes = candidates(subject.worker, subject.reference, subject.key[0])
        most = _most_trials(len(changes))
        folder = report if report.is_dir() else report.parent
        case = received(_case_of(subject), given or Options(), folder=folder)
        runner = stack.enter_context(_runner(subject, case, scratch, faults or {}, progress))
        trials: list[Trial] = []

        def are_gone(change_sets: Sequence[Sequence[Change]]) -> list[bool]:
            new_trials = runner.run_all(change_sets)
            trials.extend(new_trials)
            for trial in new_trials:
                watch(trial, most)
            return [trial.gone for trial in new_trials]

        # without a change first: a difference that does not show again cannot be explained
        repeats = not are_gone([()])[0]
        unchanged = trials[0]
        if unchanged.detail == NOT_SEEN:
            raise UsageError("the tensor is not recorded when its layer is run alone", where=name)
        if unchanged.lost:
            raise InputError(
                "nothing was tested: the run without a change ended early", where=name, got=unchanged.detail
            )
        explained = smallest(changes, are_gone) if repeats else ()
    return Answer(
        tensor=name,
        worker=subject.worker.label,
        reference=subject.reference.label,
        repeats=repeats,
        explained_by=tuple(change.name for change in explained),
        trials=tuple(trials),
    )


def _most_trials(changes: int) -> int:
    """Return the largest number of trials for some changes: unchanged, each alone, together, and all but one."""
    most = 1 + changes
    return most + 1 + changes if changes > 1 else most


def _subject(report: Path, number: int | None, tensor: str | None, label: str | None, scratch: Path) -> Subject:
    """Return the difference that a finding, or a tensor and the label of a worker, names."""
    is_of_finding = number is not None or (tensor is None and label is None)
    bad = is_fact = False
    if is_of_finding:
        evidence = find_evidence(report, number, scratch)
        worker, reference, key = evidence.worker, evidence.reference, evidence.record.key
        bad = evidence.is_bad
        is_fact = bad and evidence.record.rule == Rule.LIMIT
    elif tensor is not None and label is not None:
        worker, reference, key = find_tensor(report, tensor, label, scratch)
    else:
        raise UsageError(
            "--tensor and --worker need each other", wanted="--finding N, or --tensor NAME and --worker NAME"
        )
    if worker.capture is not reference.capture:
        raise UsageError(
            "the worker and its reference are from two captures, which may be of two machines",
            got=f"{worker.label}, {reference.label}",
            hint="run the case on this machine, and bisect that report",
        )
    return Subject(worker=worker, reference=reference, key=key, bad=bad, is_fact=is_fact)


def _case_of(subject: Subject) -> Case:
    """Return the case of one layer of one stage."""
    stage, layer, _ = subject.key
    return msgspec.structs.replace(
        subject.worker.case, stages=with_judges((Stage(stage),)), only=(f"{stage}::{layer}",), repeat=1
    )


@contextmanager
def _runner(
    subject: Subject, case: Case, scratch: Path, faults: Mapping[str, str], progress: Watcher
) -> Iterator[_Runner]:
    """Yield a runner of trials: libraries are imported once for all trials whose environments allow it."""
    processes = 2 if _needs_judge(subject) else 1
    threads = processes * _threads(subject.worker)
    # a group takes several devices at once, so groups run one after the other
    at_once = 1 if _group_of(subject) else max(1, available_cores() // threads)
    with (
        closing(Importers(models=case.needs_model, folder=scratch)) as importers,
        ThreadPoolExecutor(max_workers=at_once) as pool,
    ):
        yield _Runner(subject, case, scratch, faults, progress, importers, pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrialResult:
    """The outcome of a trial, without its changes."""

    gone: bool  # whether the difference is gone
    detail: str  # the state of the tensor in words
    lost: bool = False  # whether the worker or the stage ended early


class _Runner:
    """Run the worker of a subject with changes, a few at a time, and report whether the difference is gone."""

    def __init__(
        self,
        subject: Subject,
        case: Case,
        scratch: Path,
        faults: Mapping[str, str],
        progress: Watcher,
        importers: Importers,
        pool: Executor,
    ) -> None:
        self._scheduler = LocalScheduler(importers)
        self._pool = pool
        self._subject = subject
        self._case = case
        self._progress = progress
        self._targets = (scratch / f"trial-{number}" for number in itertools.count())
        self._faults = faults
        self._group = _group_of(subject)
        names = self._group or (subject.reference.info.name, subject.worker.info.name)
        self._devices = {info.spec.name: info for info in select(names)}
        self._reference: Capture | None = None  # None for a group, whose trials have every rank
        if not self._group:
            self._expect_environment(importers)
            self._reference = self._capture(subject.reference, Change(), next(self._targets))

    def run_all(self, change_sets: Sequence[Sequence[Change]]) -> list[Trial]:
        """Try sets of changes, as many at once as there are processors for."""
        return list(self._pool.map(self._trial, change_sets, [next(self._targets) for _ in change_sets]))

    def _expect_environment(self, importers: Importers) -> None:
        """Announce the environment of trials on a CPU: the reference worker, which comes first, may have another."""
        worker = self._subject.worker
        info = self._devices[worker.info.name]
        if info.spec.is_cpu:
            load_path = LoadPath(worker.info.load_path).main
            threads = _threads(worker)
            importers.expect(worker_environment(info, load_path, threads=threads, pinned=self._case.is_pinned))

    def _trial(self, changes: Sequence[Change], target: Path) -> Trial:
        """Run a trial whose capture is written to a folder."""
        change = Change.together(changes)
        capture_worker = self._capture_group if self._group else self._capture
        capture = capture_worker(self._subject.worker, change, target)
        judgement = self._lost_worker(capture)
        if judgement is None:
            judgement = self._judge_capture(capture, change.load_path or LoadPath(self._subject.worker.load_path))
        return Trial(
            changes=tuple(change.name for change in changes),
            gone=judgement.gone,
            detail=judgement.detail,
            lost=judgement.lost,
        )

    def _lost_worker(self, capture: Capture) -> _TrialResult | None:
        """Return that a worker of a capture was lost; None where all ended well."""
        for worker in capture.workers:
            if worker.info.status != "ok":
                return _TrialResult(gone=False, detail=f"the worker was lost: {worker.info.reason}", lost=True)
        return None

    def _judge_capture(self, capture: Capture, load_path: LoadPath) -> _TrialResult:
        """Return whether the difference is gone from a trial's capture."""
        captures = [capture] if self._reference is None else [self._reference, capture]
        comparison = judging.compare_captures(captures)
        name = self._subject.worker.info.name
        # the worker of the trial may have the name of the reference worker, which comes first
        label = next(worker.label for worker in reversed(gather(captures)) if worker.info.name == name)
        statuses = set[str]()
        blocked = ""
        for tensor in comparison.tensors:
            outcome = tensor.outcome(label)
            if outcome is None or tensor.load_path != load_path or tensor.stage != self._subject.key[0]:
                continue
            statuses.add(outcome.status)
            if outcome.status == "blocked" and not blocked:
                blocked = f"the stage was not run to its end: {outcome.reason}"
            if (tensor.stage, tensor.layer, tensor.tensor) == self._subject.key:
                return self._judge_tensor(tensor, outcome)
        # a fact may be recorded only where it is wrong: it is right where the whole stage was judged without it
        was_judged = statuses & _JUDGED and not statuses & {"blocked", "missing"}
        if self._subject.is_fact and was_judged:
            return _TrialResult(gone=True, detail="not found")
        return _TrialResult(gone=False, detail=blocked or NOT_SEEN, lost=bool(blocked))

    def _judge_tensor(self, tensor: TensorComparison, outcome: Outcome) -> _TrialResult:
        """Return whether the difference is gone from the tensor that it was found in."""
        if self._subject.bad:
            ratio = "" if outcome.ratio is None else f", {float(outcome.ratio):.3g} of the bound"
            return _TrialResult(gone=outcome.status in _JUDGED - BAD, detail=f"{outcome.status}{ratio}")
        is_equal = len(tensor.classes) == 1
        detail = "bitwise equal" if is_equal else f"differs bitwise, {outcome.status}"
        return _TrialResult(gone=is_equal, detail=detail)

    def _capture_group(self, worker: ComparedWorker, change: Change, target: Path) -> Capture:
        """Run every rank of the group with a change."""
        load_path = (change.load_path or LoadPath(worker.info.load_path)).main
        case = msgspec.structs.replace(self._case, load_paths=(load_path,))
        waves = []
        for wave in plan_waves(case, [self._devices[name] for name in self._group]):
            waves.append([dataclasses.replace(plan, change=change) for plan in wave])
        task = CaseTask(case=case, waves=waves, target=target, faults=self._faults)
        return self._run_task(task, worker, change, "unchanged")

    def _capture(self, worker: ComparedWorker, change: Change, target: Path) -> Capture:
        """Run one worker with a change, after a reference worker where its float64 results must not be its own."""
        load_path = change.load_path or LoadPath(worker.info.load_path)
        is_trial = worker is self._subject.worker
        has_judge = is_trial and _needs_judge(self._subject)
        plan = WorkerPlan(
            info=self._devices[worker.info.name],
            load_path=load_path.main,
            alternative_paths=() if load_path.is_main else (load_path,),
            makes_reference=not has_judge,
            others_wait=has_judge,
            change=change,
        )
        wave = [self._judge_plan(), plan] if has_judge else [plan]
        faults = self._faults if is_trial else {}
        task = CaseTask(case=self._case, waves=[wave], target=target, faults=faults)
        unchanged = "reference" if worker is self._subject.reference else "unchanged"
        capture = self._run_task(task, worker, change, unchanged)
        # the judge's own rows are known from the run of the reference worker alone
        workers = tuple(captured for captured in capture.workers if captured.info.name == worker.info.name)
        return msgspec.structs.replace(capture, workers=workers)

    def _run_task(self, task: CaseTask, worker: ComparedWorker, change: Change, unchanged: str) -> Capture:
        """Run workers and return their capture; `unchanged` is the name of a run without a change."""
        limits = Limits(threads=change.threads or _threads(worker))
        name = change.name or unchanged
        capture_case(self._scheduler, task, limits, watch=lambda _, event: self._progress(name, event))
        return read_capture(task.target)

    def _judge_plan(self) -> WorkerPlan:
        """Return the plan of the reference worker as it makes the float64 results of a trial."""
        reference = self._subject.reference
        return WorkerPlan(
            info=self._devices[reference.info.name],
            load_path=LoadPath(reference.info.load_path).main,
            makes_reference=True,
        )


def _needs_judge(subject: Subject) -> bool:
    """Report whether the worker of a trial must not make its own float64 results: kernels of the CPU are to be judged.

    What is wrong in every dtype on one kernel variant would be wrong in its float64 results too, and so be no error.
    """
    if subject.worker.info.name == subject.reference.info.name:
        return False
    return subject.worker.is_cpu and subject.reference.is_cpu and SPECS[Stage(subject.key[0])].feeds_inputs


def _group_of(subject: Subject) -> tuple[str, ...]:
    """Return the names of the ranks of the group that a difference was found in; none where it was found alone."""
    if not SPECS[Stage(subject.key[0])].together:
        return ()
    # a stage may also have groups of fewer ranks: the largest one has all of them
    largest_group: tuple[str, ...] = ()
    for key, record in subject.worker.records.items():
        if key[0] != subject.key[0]:
            continue
        ranks = tuple(record.evidence.get("ranks", ()))
        if len(ranks) > len(largest_group):
            largest_group = ranks
    return largest_group


def _threads(worker: ComparedWorker) -> int:
    """Return the number of threads that a worker recorded, 1 without any."""
    return int(worker.info.environment.get("threads") or 1)


_SDPA = {
    "SDPA flash": {"sdpa_math": False, "sdpa_flash": True},
    "SDPA memory-efficient": {"sdpa_math": False, "sdpa_mem_efficient": True},
}


def smallest(
    changes: Sequence[Change], are_gone: Callable[[Sequence[Sequence[Change]]], list[bool]]
) -> tuple[Change, ...]:
    """Return the smallest set of changes that removes a difference, as far as few trials can find it.

    Each change is tried alone, then all together. If the difference is then gone, each change is left out again as long
    as the others suffice, so that no change in the result can be spared.

    `are_gone` tries sets of changes, and returns for each whether the difference is gone with it.
    """
    for change, is_gone in zip(changes, are_gone([(change,) for change in changes]), strict=True):
        if is_gone:
            return (change,)
    combined: list[Change] = []
    for change in changes:  # of two that set the same thing, the first
        if not any(change.touches & earlier.touches for earlier in combined):
            combined.append(change)
    if len(combined) < 2 or not are_gone([combined])[0]:
        return ()
    for change in tuple(combined):
        without_change = [other for other in combined if other is not change]
        if without_change and are_gone([without_change])[0]:
            combined = without_change
    return tuple(combined)


def candidates(subject: ComparedWorker, reference: ComparedWorker, stage: str) -> tuple[Change, ...]:
    """Return the changes that could explain a difference of a worker, each to be tried alone."""
    spec = parse_device(subject.info.name)
    backend = backend_of(spec.type)
    variant = spec.numerical_variant() or Variant(name="native")
    stage_spec = SPECS[Stage(stage)]
    changes: list[Change] = []
    if stage_spec.together:
        for name, text in backend.of_collectives.items():
            changes.append(Change(name=f"{name}={text}", environment={name: text}))
    changes += _variant_changes(variant, reference)
    changes += _thread_changes(subject, reference)
    if subject.info.environment.get("dtype") in ("bfloat16", "float16") and subject.case.adapter is not None:
        changes.append(Change(name="autocast_adapter_dtype=False", autocast_adapter_dtype=False))
    if stage_spec.multiplies:
        changes += _kernel_changes(subject, backend, variant)
        if not spec.is_cpu:
            changes += [Change(name=name, settings=settings) for name, settings in _SDPA.items()]
    load_path = LoadPath(subject.load_path)
    if load_path.main is LoadPath.SHARED:
        changes.append(Change(name="the other devices hidden", load_path=load_path.beside(LoadPath.ISOLATED)))
    if stage == standard.ADAPTER:
        changes += _load_path_changes(load_path, is_cpu=spec.is_cpu)
    return tuple(changes)


def _variant_changes(variant: Variant, reference: ComparedWorker) -> Iterator[Change]:
    """Yield the changes that take back what a kernel variant sets."""
    for name in variant.environment:
        yield Change(name=f"{name} unset", environment={name: None})
    for name, value in reference.info.asked.items():
        if name in variant.settings and variant.settings[name] != value:
            yield Change(name=f"{name} = {value}", settings={name: value})


def _thread_changes(subject: ComparedWorker, reference: ComparedWorker) -> Iterator[Change]:
    """Yield the number of threads of the reference worker, or another one where both have the same."""
    threads, reference_threads = (worker.info.environment.get("threads") for worker in (subject, reference))
    if not isinstance(threads, int) or not isinstance(reference_threads, int):
        return
    if reference_threads != threads:
        other_threads = reference_threads
    elif threads == 1:
        other_threads = 2
    else:
        other_threads = 1
    name = "1 thread" if other_threads == 1 else f"{other_threads} threads"
    yield Change(name=name, threads=other_threads)


def _kernel_changes(subject: ComparedWorker, backend: Backend, variant: Variant) -> Iterator[Change]:
    """Yield the other kernels that a backend has, except where the kernel variant chooses them."""
    for name, (value, text) in backend.alternatives.items():
        if name in subject.info.asked and name not in variant.settings:
            yield Change(name=text, settings={name: value})


def _load_path_changes(load_path: LoadPath, *, is_cpu: bool) -> Iterator[Change]:
    """Yield the load paths that the adapter's bytes could have taken instead."""
    main = load_path.main
    load_paths = {"the default load path": main, "torch_device='cpu'": LoadPath(f"{main}+cpu")}
    if not is_cpu:
        load_paths["torch_device=target"] = LoadPath(f"{main}+target")
    if load_path.low_memory:
        load_paths["low_cpu_mem_usage=False"] = load_path.without_low_memory
    else:
        load_paths["low_cpu_mem_usage=True"] = LoadPath(f"{load_path}+low-memory")
    load_paths["transformers' loader"] = LoadPath(f"{main}+transformers")
    for name, other_path in load_paths.items():
        if other_path is not load_path:
            yield Change(name=name, load_path=other_path)
