"""Which setting explains a difference? Switch one at a time, run only the layer concerned, name the smallest set.

Every trial is one worker on the device of the finding, with one or more settings changed before its process starts; it
is held against a run of the reference worker. Nothing else about it differs from the run that found the difference.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from consistency.capture.folder import Capture, read_capture
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.stages import Stage
from consistency.comparison.result import BAD
from consistency.comparison.workers import ComparedWorker, Key, gather
from consistency.devices.backends import Variant, backend_of
from consistency.devices.cores import available_cores
from consistency.devices.discovery import select
from consistency.devices.spec import DeviceInfo, parse_device
from consistency.errors import UsageError
from consistency.launch.change import Change
from consistency.launch.plan import WorkerPlan
from consistency.launch.process import Limits
from consistency.workflows import pipeline
from consistency.workflows.reproduce.evidence import find_evidence, find_tensor

_SDPA = {
    "SDPA flash": {"sdpa_math": False, "sdpa_flash": True},
    "SDPA memory-efficient": {"sdpa_math": False, "sdpa_mem_efficient": True},
}


NOT_SEEN = "the tensor was not seen"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a set of changes.

    Attributes
    ----------
    changes : tuple of str
    gone : bool
        Whether the difference is gone with them.
    detail : str
    """

    changes: tuple[str, ...]
    gone: bool
    detail: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What explains a difference.

    Attributes
    ----------
    tensor, worker, reference : str
    repeats : bool
        Whether the difference shows at all when the worker is run again as it was.
    explained_by : tuple of str
        The smallest set of changes found that makes it go away; empty where none does.
    trials : tuple of Trial
    """

    tensor: str
    worker: str
    reference: str
    repeats: bool
    explained_by: tuple[str, ...]
    trials: tuple[Trial, ...]

    @property
    def sentence(self) -> str:
        """Say it in one sentence."""
        if not self.repeats:
            return f"{self.tensor} on {self.worker} does not differ when it is run again as it was: nothing to explain"
        if not self.explained_by:
            tried = len({change for trial in self.trials for change in trial.changes})
            return f"none of the {tried} settings explains {self.tensor} on {self.worker}, alone or all together"
        return f"{self.tensor} on {self.worker} is as it should be with {' and '.join(self.explained_by)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The difference to be explained.

    Attributes
    ----------
    bad : bool
        The row is outside its rule; else it only has other bits than the reference worker.
    """

    participant: ComparedWorker
    reference: ComparedWorker
    key: Key
    bad: bool
    faults: Mapping[str, str] = field(default_factory=dict)


def bisect(
    report: Path,
    *,
    number: int | None = None,
    tensor: str | None = None,
    worker: str | None = None,
    watch: Callable[[Trial], None] = lambda _: None,
    faults: Mapping[str, str] | None = None,
) -> Answer:
    """Find the smallest set of settings that makes a difference go away.

    Parameters
    ----------
    report : Path
        `report.json`, or its folder.
    number : int, optional
        Of the finding, from 1; or
    tensor, worker : str, optional
        `stage::layer.tensor` and the worker on which its bits are not the reference worker's.
    watch : callable
        Called with each trial.
    faults : mapping of str to str, optional
        Faults that were planted, by device: they are part of how it was.

    Raises
    ------
    UsageError, CaptureError
    """
    with tempfile.TemporaryDirectory(prefix="consistency-bisect-") as scratch:
        subject = _subject(report, number, tensor, worker, Path(scratch), dict(faults or {}))
        changes = candidates(subject.participant, subject.reference, subject.key[0])
        run = _Runner(subject, Path(scratch))
        trials: list[Trial] = []

        def gone(chosen: Sequence[Sequence[Change]]) -> list[bool]:
            found = run.all(chosen)
            trials.extend(found)
            for trial in found:
                watch(trial)
            return [trial.gone for trial in found]

        repeats = not gone([()])[0]
        if trials[0].detail == NOT_SEEN:
            raise UsageError(
                "the tensor is not there when its layer is run alone", where="{}::{}.{}".format(*subject.key)
            )
        explained = smallest(changes, gone) if repeats else ()
    return Answer(
        tensor="{}::{}.{}".format(*subject.key),
        worker=subject.participant.label,
        reference=subject.reference.label,
        repeats=repeats,
        explained_by=tuple(change.name for change in explained),
        trials=tuple(trials),
    )


def smallest(changes: Sequence[Change], gone: Callable[[Sequence[Sequence[Change]]], list[bool]]) -> tuple[Change, ...]:
    """Return the smallest set of changes that makes a difference go away, as far as it can be told in few trials.

    Each alone first; where none does it, all together; where that does it, each is taken away again if the rest still
    does. What is left has no part that could be spared.
    """
    for change, is_gone in zip(changes, gone([(change,) for change in changes]), strict=True):
        if is_gone:
            return (change,)
    compatible = _together(changes)
    if len(compatible) < 2 or not gone([compatible])[0]:
        return ()
    kept = list(compatible)
    for change in compatible:
        rest = [other for other in kept if other is not change]
        if rest and gone([rest])[0]:
            kept = rest
    return tuple(kept)


def candidates(subject: ComparedWorker, reference: ComparedWorker, stage: str) -> tuple[Change, ...]:
    """Return what could explain a difference of a worker, each to be switched alone.

    What the worker's variant sets is put back, each variable by itself; threads become the reference worker's; on an
    accelerator each pinned setting is switched to its other value, and with other devices in sight these are hidden.
    """
    spec = parse_device(subject.info.name)
    variant = spec.numerical_variant() or Variant(name="native")
    found = [Change(name=f"{name} unset", environment={name: None}) for name in variant.environment]
    usual = {name: value for name, value in reference.info.asked.items() if name in variant.settings}
    found += [
        Change(name=f"{name} = {value}", settings={name: value})
        for name, value in usual.items()
        if value != variant.settings[name]
    ]
    threads, wanted = subject.info.environment.get("threads"), reference.info.environment.get("threads")
    if isinstance(threads, int) and isinstance(wanted, int):
        other = wanted if wanted != threads else threads + 1 if threads == 1 else 1
        found.append(Change(name=f"{other} threads" if other != 1 else "1 thread", threads=other))
    if subject.info.environment.get("dtype") in ("bfloat16", "float16") and subject.case.adapter is not None:
        found.append(Change(name="autocast_adapter_dtype=False", autocast_adapter_dtype=False))
    if not spec.is_cpu:
        for name, (value, text) in backend_of(spec.type).alternatives.items():
            if name in subject.info.asked and name not in variant.settings:
                found.append(Change(name=text, settings={name: value}))
        found += [Change(name=name, settings=settings) for name, settings in _SDPA.items()]
    return (*found, *_load_paths(subject, stage))


def _load_paths(subject: ComparedWorker, stage: str) -> Iterable[Change]:
    """Yield the roads that the adapter's bytes, or else the whole worker, could have taken instead."""
    load_path = LoadPath(subject.load_path)
    if load_path.main is LoadPath.SHARED:
        yield Change(name="the other devices hidden", load_path=load_path.beside(LoadPath.ISOLATED))
    if stage != Stage.ADAPTER:
        return
    others = [("the default road", load_path.main), ("torch_device='cpu'", LoadPath(f"{load_path.main}+cpu"))]
    if not parse_device(subject.info.name).is_cpu:
        others.append(("torch_device=target", LoadPath(f"{load_path.main}+target")))
    others.append(
        ("low_cpu_mem_usage=False", load_path.without_low_memory)
        if load_path.low_memory
        else ("low_cpu_mem_usage=True", LoadPath(f"{load_path}+low-memory"))
    )
    others.append(("transformers' loader", LoadPath(f"{load_path.main}+transformers")))
    yield from (Change(name=name, load_path=other) for name, other in dict(others).items() if other is not load_path)


def _together(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Return changes that can be made at once: of two that set the same thing, the first."""
    taken: frozenset[str] = frozenset()
    found = []
    for change in changes:
        if not change.touches & taken:
            taken |= change.touches
            found.append(change)
    return tuple(found)


def _subject(
    report: Path, number: int | None, tensor: str | None, worker: str | None, scratch: Path, faults: dict[str, str]
) -> Subject:
    if number is not None:
        evidence = find_evidence(report, number, scratch)
        participant, key = evidence.participant, evidence.record.key
        reference = evidence.reference
        bad = evidence.is_bad
    elif tensor is not None and worker is not None:
        participant, reference, key = find_tensor(report, tensor, worker, scratch)
        bad = False
    else:
        raise UsageError("nothing to explain", wanted="--finding N, or --tensor NAME and --worker NAME")
    if participant.capture is not reference.capture:
        raise UsageError(
            "the worker and its reference are of two captures: one of them may be another machine's",
            got=f"{participant.label}, {reference.label}", hint="run the case on this machine, and bisect that report",
        )  # fmt: skip
    return Subject(participant=participant, reference=reference, key=key, bad=bad, faults=faults)


class _Runner:
    """Run workers of a subject with changes, a few at a time, and tell whether the difference is gone."""

    def __init__(self, subject: Subject, scratch: Path) -> None:
        self._subject = subject
        self._scratch = scratch
        self._count = 0
        stage, layer, _ = subject.key
        case: Case = subject.participant.case
        self._case = msgspec.structs.replace(case, stages=(Stage(stage),), only=(f"{stage}::{layer}",), repeat=1)
        self._devices = {info.spec.name: info for info in select(self._names())}
        self._reference = self._capture(subject.reference, ())

    def _names(self) -> tuple[str, ...]:
        return (self._subject.reference.info.name, self._subject.participant.info.name)

    def all(self, chosen: Sequence[Sequence[Change]]) -> list[Trial]:
        """Try sets of changes, as many at once as there are processors for."""
        threads = int(self._subject.participant.info.environment.get("threads") or 1)
        with ThreadPoolExecutor(max_workers=max(1, available_cores() // threads)) as pool:
            return list(pool.map(self._trial, chosen))

    def _trial(self, changes: Sequence[Change]) -> Trial:
        found = self._capture(self._subject.participant, changes)
        names = tuple(change.name for change in changes)
        load_path = Change.together(changes).load_path or LoadPath(self._subject.participant.load_path)
        (worker,) = found.workers
        if worker.info.status != "ok":
            return Trial(changes=names, gone=False, detail=f"the worker was lost: {worker.info.reason}")
        comparison = pipeline.compare_captures([self._reference, found])
        label = gather([self._reference, found])[-1].label
        for tensor in comparison.tensors:
            row = tensor.row(label)
            if (
                (tensor.stage, tensor.layer, tensor.tensor) != self._subject.key
                or tensor.load_path != load_path
                or row is None
            ):
                continue
            if self._subject.bad:
                ratio = "" if row.bound_ratio is None else f", {float(row.bound_ratio):.3g} of the bound"
                return Trial(changes=names, gone=row.status not in BAD, detail=f"{row.status}{ratio}")
            same = len(tensor.classes) == 1
            return Trial(changes=names, gone=same, detail="equal bits" if same else f"other bits, {row.status}")
        return Trial(changes=names, gone=False, detail=NOT_SEEN)

    def _capture(self, who: ComparedWorker, changes: Sequence[Change]) -> Capture:
        info: DeviceInfo = self._devices[who.info.name]
        self._count += 1
        target = self._scratch / f"trial-{self._count}"
        merged = Change.together(changes)
        load_path = merged.load_path or LoadPath(who.info.load_path)
        sides = () if load_path.is_main else (load_path,)
        plan = WorkerPlan(
            info=info, load_path=load_path.main, alternative_paths=sides, makes_reference=True, change=merged
        )
        threads = merged.threads or int(who.info.environment.get("threads") or 1)
        pipeline.capture_plans(
            self._case,
            [[plan]],
            target,
            limits=Limits(threads=threads),
            faults=self._subject.faults if who is self._subject.participant else {},
        )
        return read_capture(target)
