"""Which setting explains a difference? Change one at a time, rerun only the layer concerned, name the smallest set.

Every trial is one worker on the device of the finding, with one or more settings changed before its process starts; it
is compared with a run of the reference worker. Float64 results are made on the CPU by the worker of the trial; where
that worker's device is a kernel variant of the CPU, which the trial is to judge, the reference worker runs beside it
and makes them. In a stage whose workers form a group, every trial is the whole group, with the settings of each rank
changed. Everything else is as in the run that found the difference.
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
from consistency.comparison.records import Key
from consistency.comparison.result import BAD, tensor_name
from consistency.comparison.workers import ComparedWorker, gather
from consistency.devices.backend import Variant
from consistency.devices.backends import backend_of
from consistency.devices.cores import available_cores
from consistency.devices.discovery import select
from consistency.devices.spec import parse_device
from consistency.errors import InputError, UsageError
from consistency.extras.diagnosis.reproduce.evidence import find_evidence, find_tensor
from consistency.launch.change import Change
from consistency.launch.engine import CaseTask, Limits, Watcher, capture_case
from consistency.launch.environment import worker_environment
from consistency.launch.forked import Importers
from consistency.launch.local import LocalEngine
from consistency.launch.plan import WorkerPlan, plan_waves
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

    participant: ComparedWorker
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
        Of the finding, from 1, where there are several; or
    tensor, worker : str, optional
        `stage::layer.tensor` and the worker on which it differs bitwise from the reference worker.
    watch : callable
        Called with each trial, and how many there will be at most.
    progress : callable
        Called with what a trial changes, and each event of its worker.
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
        changes = candidates(subject.participant, subject.reference, subject.key[0])
        most = 1 + len(changes) + (1 + len(changes) if len(changes) > 1 else 0)  # unchanged, alone, all but one
        folder = report if report.is_dir() else report.parent
        case = received(_case_of(subject), given or Options(), folder=folder)
        run = stack.enter_context(_runner(subject, case, scratch, faults or {}, progress))
        trials: list[Trial] = []

        def gone(chosen: Sequence[Sequence[Change]]) -> list[bool]:
            found = run.all(chosen)
            trials.extend(found)
            for trial in found:
                watch(trial, most)
            return [trial.gone for trial in found]

        repeats = not gone([()])[0]
        if trials[0].detail == NOT_SEEN:
            raise UsageError("the tensor is not recorded when its layer is run alone", where=name)
        if trials[0].lost:
            raise InputError(
                "nothing was tested: the run without a change ended early", where=name, got=trials[0].detail
            )
        explained = smallest(changes, gone) if repeats else ()
    return Answer(
        tensor=name,
        worker=subject.participant.label,
        reference=subject.reference.label,
        repeats=repeats,
        explained_by=tuple(change.name for change in explained),
        trials=tuple(trials),
    )


def _subject(report: Path, number: int | None, tensor: str | None, worker: str | None, scratch: Path) -> Subject:
    of_finding = tensor is None and worker is None
    if number is not None or of_finding:
        evidence = find_evidence(report, number, scratch)
        participant, reference, key = evidence.participant, evidence.reference, evidence.record.key
    elif tensor is not None and worker is not None:
        participant, reference, key = find_tensor(report, tensor, worker, scratch)
    else:
        raise UsageError(
            "--tensor and --worker need each other", wanted="--finding N, or --tensor NAME and --worker NAME"
        )
    if participant.capture is not reference.capture:
        raise UsageError(
            "the worker and its reference are from two captures, which may be of two machines",
            got=f"{participant.label}, {reference.label}",
            hint="run the case on this machine, and bisect that report",
        )
    bad = (number is not None or of_finding) and evidence.is_bad
    is_fact = bad and evidence.record.rule == Rule.LIMIT
    return Subject(participant=participant, reference=reference, key=key, bad=bad, is_fact=is_fact)


def _case_of(subject: Subject) -> Case:
    """Return the case of one layer of one stage."""
    stage, layer, _ = subject.key
    return msgspec.structs.replace(
        subject.participant.case, stages=with_judges((Stage(stage),)), only=(f"{stage}::{layer}",), repeat=1
    )


@contextmanager
def _runner(
    subject: Subject, case: Case, scratch: Path, faults: Mapping[str, str], progress: Watcher
) -> Iterator[_Runner]:
    """Yield what runs trials: libraries are imported once for all whose environments allow it."""
    processes = 2 if _needs_judge(subject) else 1
    threads = processes * _threads(subject.participant)
    at_once = 1 if _group_of(subject) else max(1, available_cores() // threads)
    with (
        closing(Importers(models=case.needs_model, folder=scratch)) as importers,
        ThreadPoolExecutor(max_workers=at_once) as pool,
    ):
        yield _Runner(subject, case, scratch, faults, progress, importers, pool)


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
        self._engine = LocalEngine(importers)
        self._pool = pool
        self._subject = subject
        self._case = case
        self._progress = progress
        self._targets = (scratch / f"trial-{number}" for number in itertools.count())
        self._faults = faults
        self._group = _group_of(subject)
        names = self._group or (subject.reference.info.name, subject.participant.info.name)
        self._devices = {info.spec.name: info for info in select(names)}
        self._reference: Capture | None = None
        if not self._group:
            who, info = subject.participant, self._devices[subject.participant.info.name]
            if info.spec.is_cpu:  # the reference worker, which comes first, is not alone with its environment
                path = LoadPath(who.info.load_path).main
                importers.expect(worker_environment(info, path, threads=_threads(who), pinned=case.is_pinned))
            self._reference = self._capture(subject.reference, Change(), next(self._targets))

    def all(self, chosen: Sequence[Sequence[Change]]) -> list[Trial]:
        """Try sets of changes, as many at once as there are processors for."""
        return list(self._pool.map(self._trial, chosen, [next(self._targets) for _ in chosen]))

    def _trial(self, changes: Sequence[Change], target: Path) -> Trial:
        change = Change.together(changes)
        run = self._capture_group if self._group else self._capture
        found = run(self._subject.participant, change, target)
        path = change.load_path or LoadPath(self._subject.participant.load_path)
        lost = next((f"the worker was lost: {one.info.reason}" for one in found.workers if one.info.status != "ok"), "")
        gone, detail, failed = (False, lost, True) if lost else self._judged(found, path)
        return Trial(changes=tuple(change.name for change in changes), gone=gone, detail=detail, lost=failed)

    def _judged(self, found: Capture, load_path: LoadPath) -> tuple[bool, str, bool]:
        """Return whether the difference is gone from a trial's capture, in words what is there, and if that failed."""
        captures = [found] if self._reference is None else [self._reference, found]
        comparison = judging.compare_captures(captures)
        name = self._subject.participant.info.name
        label = next(one.label for one in reversed(gather(captures)) if one.info.name == name)
        seen, failed = set[str](), ""
        for tensor in comparison.tensors:
            row = tensor.outcome(label)
            place = (tensor.stage, tensor.layer, tensor.tensor)
            if row is None or tensor.load_path != load_path or tensor.stage != self._subject.key[0]:
                continue
            seen.add(row.status)
            failed = failed or (f"the stage was not run to its end: {row.reason}" if row.status == "blocked" else "")
            if place != self._subject.key:
                continue
            if self._subject.bad:
                ratio = "" if row.ratio is None else f", {float(row.ratio):.3g} of the bound"
                return row.status in _JUDGED - BAD, f"{row.status}{ratio}", False
            same = len(tensor.classes) == 1
            return same, "bitwise equal" if same else f"differs bitwise, {row.status}", False
        if self._subject.is_fact and seen & _JUDGED and not seen & {"blocked", "missing"}:
            return True, "not found", False
        return False, failed or NOT_SEEN, bool(failed)

    def _capture_group(self, who: ComparedWorker, change: Change, target: Path) -> Capture:
        """Run every rank of the group with a change."""
        load_path = (change.load_path or LoadPath(who.info.load_path)).main
        case = msgspec.structs.replace(self._case, load_paths=(load_path,))
        planned = plan_waves(case, [self._devices[name] for name in self._group])
        waves = [[dataclasses.replace(plan, change=change) for plan in wave] for wave in planned]
        task = CaseTask(case=case, waves=waves, target=target, faults=self._faults)
        name = change.name or "unchanged"
        limits = Limits(threads=change.threads or _threads(who))
        capture_case(self._engine, task, limits, watch=lambda _, event: self._progress(name, event))
        return read_capture(target)

    def _capture(self, who: ComparedWorker, change: Change, target: Path) -> Capture:
        load_path = change.load_path or LoadPath(who.info.load_path)
        has_judge = who is self._subject.participant and _needs_judge(self._subject)
        plan = WorkerPlan(
            info=self._devices[who.info.name],
            load_path=load_path.main,
            alternative_paths=() if load_path.is_main else (load_path,),
            makes_reference=not has_judge,
            others_wait=has_judge,
            change=change,
        )
        wave = [plan]
        if has_judge:
            wave.insert(0, self._judge())
        task = CaseTask(
            case=self._case,
            waves=[wave],
            target=target,
            faults=self._faults if who is self._subject.participant else {},
        )
        limits = Limits(threads=change.threads or _threads(who))
        name = change.name or ("reference" if who is self._subject.reference else "unchanged")
        capture_case(self._engine, task, limits, watch=lambda _, event: self._progress(name, event))
        captured = read_capture(target)
        # the judge's own rows are known from the run of the reference worker alone
        workers = tuple(worker for worker in captured.workers if worker.info.name == who.info.name)
        return msgspec.structs.replace(captured, workers=workers)

    def _judge(self) -> WorkerPlan:
        """Return the reference worker as it makes the float64 results of a trial."""
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
    if subject.participant.info.name == subject.reference.info.name:
        return False
    return subject.participant.is_cpu and subject.reference.is_cpu and SPECS[Stage(subject.key[0])].feeds_inputs


def _group_of(subject: Subject) -> tuple[str, ...]:
    """Return the names of the ranks of the group that a difference was found in; none where it was found alone."""
    if not SPECS[Stage(subject.key[0])].together:
        return ()
    rows = (record for key, record in subject.participant.records.items() if key[0] == subject.key[0])
    ranks: tuple[str, ...] = max((tuple(row.evidence.get("ranks", ())) for row in rows), key=len, default=())
    return ranks


def _threads(who: ComparedWorker) -> int:
    return int(who.info.environment.get("threads") or 1)


_SDPA = {
    "SDPA flash": {"sdpa_math": False, "sdpa_flash": True},
    "SDPA memory-efficient": {"sdpa_math": False, "sdpa_mem_efficient": True},
}


def smallest(changes: Sequence[Change], gone: Callable[[Sequence[Sequence[Change]]], list[bool]]) -> tuple[Change, ...]:
    """Return the smallest set of changes that removes a difference, as far as few trials can find it.

    Each change is tried alone, then all together. If the difference is then gone, each change is left out again as long
    as the others suffice, so that no change in the result can be spared.
    """
    for change, is_gone in zip(changes, gone([(change,) for change in changes]), strict=True):
        if is_gone:
            return (change,)
    kept: list[Change] = []
    for change in changes:  # of two that set the same thing, the first
        if not any(change.touches & other.touches for other in kept):
            kept.append(change)
    if len(kept) < 2 or not gone([kept])[0]:
        return ()
    for change in tuple(kept):
        rest = [other for other in kept if other is not change]
        if rest and gone([rest])[0]:
            kept = rest
    return tuple(kept)


def candidates(subject: ComparedWorker, reference: ComparedWorker, stage: str) -> tuple[Change, ...]:
    """Return what could explain a difference of a worker, each to be switched alone."""
    return tuple(_candidates(subject, reference, stage))


def _candidates(subject: ComparedWorker, reference: ComparedWorker, stage: str) -> Iterator[Change]:
    spec = parse_device(subject.info.name)
    backend = backend_of(spec.type)
    variant = spec.numerical_variant() or Variant(name="native")
    if SPECS[Stage(stage)].together:
        for name, told in backend.of_collectives.items():
            yield Change(name=f"{name}={told}", environment={name: told})
    yield from (Change(name=f"{name} unset", environment={name: None}) for name in variant.environment)
    for name, value in reference.info.asked.items():
        if name in variant.settings and variant.settings[name] != value:
            yield Change(name=f"{name} = {value}", settings={name: value})
    threads, expected = (p.info.environment.get("threads") for p in (subject, reference))
    if isinstance(threads, int) and isinstance(expected, int):
        other = expected if expected != threads else threads + 1 if threads == 1 else 1
        yield Change(name=f"{other} threads" if other != 1 else "1 thread", threads=other)
    if subject.info.environment.get("dtype") in ("bfloat16", "float16") and subject.case.adapter is not None:
        yield Change(name="autocast_adapter_dtype=False", autocast_adapter_dtype=False)
    computes = SPECS[Stage(stage)].multiplies
    for name, (value, text) in backend.alternatives.items():
        if computes and name in subject.info.asked and name not in variant.settings:
            yield Change(name=text, settings={name: value})
    if computes and not spec.is_cpu:
        yield from (Change(name=name, settings=settings) for name, settings in _SDPA.items())
    load_path = LoadPath(subject.load_path)
    if load_path.main is LoadPath.SHARED:
        yield Change(name="the other devices hidden", load_path=load_path.beside(LoadPath.ISOLATED))
    if stage == standard.ADAPTER:
        yield from _load_paths(load_path, is_cpu=spec.is_cpu)


def _load_paths(load_path: LoadPath, *, is_cpu: bool) -> Iterator[Change]:
    """Yield the load paths that the adapter's bytes could have taken instead."""
    main = load_path.main
    others = {"the default load path": main, "torch_device='cpu'": LoadPath(f"{main}+cpu")}
    if not is_cpu:
        others["torch_device=target"] = LoadPath(f"{main}+target")
    if load_path.low_memory:
        others["low_cpu_mem_usage=False"] = load_path.without_low_memory
    else:
        others["low_cpu_mem_usage=True"] = LoadPath(f"{load_path}+low-memory")
    others["transformers' loader"] = LoadPath(f"{main}+transformers")
    yield from (Change(name=name, load_path=other) for name, other in others.items() if other is not load_path)
