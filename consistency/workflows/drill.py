"""The drill: run the built-in case with one fault planted at a time, and see whether it is found and how it is named.

It is how a user learns to trust the tool, and how its makers do. Each fault goes into one worker's real loading path;
the run around it is the main job, as `consistency run` does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from consistency.case.load_path import LoadPath
from consistency.case.options import Options
from consistency.case.stages import Stage
from consistency.comparison.result import Comparison
from consistency.devices.discovery import accelerators, select
from consistency.devices.spec import DeviceInfo
from consistency.errors import UsageError
from consistency.launch.local import Watcher
from consistency.workflows import pipeline

STALL_S = 30.0  # a worker that hangs is given up after this; importing torch from a slow disk is quicker


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fault and what has to come of it.

    Attributes
    ----------
    fault : str
        Of `consistency.worker.faults`.
    expected : str
        Kind of the finding that has to name it.
    stages : tuple of Stage
        No more than it needs.
    case : str or None
        Which of the cases C1 to C5 that the project was made for it stands for.
    words : str
        What the finding's sentence has to hold, beside its kind.
    repeat : int
    two_devices : bool
        Whether it needs a second accelerator, and a worker that sees both.
    roads : tuple of Road or None
        Those that tell it from other causes, where the level's do not.
    wrapper : str or None
        What the base is wrapped with on every worker.
    """

    fault: str
    expected: str
    stages: tuple[Stage, ...]
    case: str | None = None
    words: str = ""
    repeat: int = 1
    two_devices: bool = False
    load_paths: tuple[LoadPath, ...] | None = None
    wrapper: str | None = None


HARMLESS_WRAPPER = "python:consistency.worker.faults.wrapping:harmless"

_ADAPTER, _MERGED, _MEMORY = (Stage.ADAPTER,), (Stage.MERGED,), (Stage.MEMORY,)
_TRANSFER, _OPERATORS, _GRADIENT = (Stage.TRANSFER,), (Stage.OPERATORS,), (Stage.GRADIENT,)

TRIALS: tuple[Trial, ...] = (
    Trial(fault="adapter-zeros", expected="zeros", stages=_ADAPTER, case="C1"),
    Trial(fault="adapter-missing-key", expected="zeros", stages=_ADAPTER, case="C1"),
    Trial(fault="adapter-half-a-page", expected="block", stages=_ADAPTER, case="C1"),
    Trial(fault="adapter-other-tensor", expected="swapped", stages=_ADAPTER, case="C1"),
    Trial(fault="adapter-layers-swapped", expected="swapped", stages=_ADAPTER, case="C1"),
    Trial(fault="adapter-copy-dropped", expected="fresh-init", stages=_ADAPTER, case="C1"),
    Trial(fault="adapter-copy-dropped-later", expected="never-written", stages=_ADAPTER, case="C1"),
    Trial(fault="adapter-old-bytes", expected="stale", stages=_ADAPTER, case="C1"),
    Trial(
        fault="road-copies-dropped",
        expected="zeros",
        stages=_ADAPTER,
        case="C1",
        words="the right bytes with torch_device=cpu: copies by way of the device",
        load_paths=(LoadPath.ISOLATED, LoadPath.ISOLATED_CPU, LoadPath.ISOLATED_LOW_MEMORY),
    ),
    Trial(
        fault="road-low-memory-rounds",
        expected="rounded-to-bf16",
        stages=_ADAPTER,
        case="C1",
        words="with low_cpu_mem_usage=True, and the right bytes without: the dtype on the way",
    ),
    Trial(
        fault="road-transformers-zeros",
        expected="zeros",
        stages=_ADAPTER,
        case="C1",
        words="transformers' loader",
        load_paths=(LoadPath.ISOLATED, LoadPath.ISOLATED_TRANSFORMERS),
    ),
    Trial(fault="adapter-bit-flip", expected="bit-flip", stages=_ADAPTER),
    Trial(fault="adapter-bit-flip-in-a", expected="bit-flip", stages=_ADAPTER),
    Trial(fault="adapter-through-bfloat16", expected="rounded-to-bf16", stages=_ADAPTER, case="C1"),
    Trial(fault="adapter-through-float16", expected="rounded-to-fp16", stages=_ADAPTER, case="C1"),
    Trial(fault="adapter-through-tf32", expected="rounded-to-tf32", stages=_ADAPTER),
    Trial(fault="adapter-nan", expected="non-finite", stages=_ADAPTER),
    Trial(fault="adapter-inactive", expected="inactive", stages=_ADAPTER),
    Trial(fault="adapter-wrong-scaling", expected="settings", stages=_ADAPTER),
    Trial(fault="transfer-dropped", expected="never-written", stages=_TRANSFER, case="C1"),
    Trial(fault="transfer-zeros", expected="zeros", stages=_TRANSFER, case="C1"),
    Trial(fault="transfer-corrupt", expected="bit-flip", stages=_TRANSFER, case="C1"),
    Trial(
        fault="transfer-stale-beside-work",
        expected="stale",
        stages=_TRANSFER,
        case="C1",
        words="only beside running work",
    ),
    Trial(fault="base-bit-flip", expected="bit-flip", stages=(Stage.BASE,)),
    Trial(fault="base-through-bfloat16", expected="rounded-to-bf16", stages=(Stage.BASE,)),
    Trial(fault="merge-bit-flip", expected="bit-flip", stages=_MERGED),
    Trial(fault="merge-in-tf32", expected="tf32-products", stages=_MERGED),
    Trial(fault="merge-zeros", expected="zeros", stages=_MERGED),
    Trial(fault="merge-off", expected="wrong-scale", stages=_MERGED),
    Trial(fault="merge-fails", expected="missing", stages=_MERGED),
    Trial(fault="forward-off", expected="wrong-scale", stages=(Stage.FORWARD,)),
    Trial(fault="forward-fails", expected="missing", stages=(Stage.FORWARD,)),
    Trial(fault="operator-off", expected="wrong-scale", stages=_OPERATORS),
    Trial(fault="operator-in-tf32", expected="tf32-products", stages=_OPERATORS),
    Trial(fault="operator-fails", expected="missing", stages=_OPERATORS),
    Trial(fault="gradient-off", expected="wrong-scale", stages=_GRADIENT),
    Trial(fault="gradient-zeros", expected="zeros", stages=_GRADIENT),
    Trial(fault="optimizer-off", expected="wrong-scale", stages=_GRADIENT),
    Trial(fault="merge-not-repeatable", expected="not-repeatable", stages=_MERGED, repeat=2),
    Trial(
        fault="wrapper-hides-model",
        expected="hidden",
        stages=(Stage.WRAPPING,),
        case="C3",
        words="hides config",
        wrapper=HARMLESS_WRAPPER,
    ),
    Trial(
        fault="wrapper-holds-twice",
        expected="held-twice",
        stages=(Stage.WRAPPING,),
        case="C3",
        wrapper=HARMLESS_WRAPPER,
    ),
    Trial(
        fault="labels-changed-on-hop",
        expected="labels-changed",
        stages=(Stage.SHARDING,),
        case="C4",
        words="labels changed on the way to device",
    ),
    Trial(
        fault="ids-past-vocabulary",
        expected="ids-past-vocabulary",
        stages=(Stage.SHARDING,),
        case="C4",
        words="ids past the vocabulary: largest id",
    ),
    Trial(fault="setting-flipped", expected="setting-changed", stages=_MERGED),
    Trial(fault="placed-elsewhere", expected="wrong-device", stages=_MEMORY, case="C2"),
    Trial(fault="bytes-elsewhere", expected="touched", stages=_MEMORY, case="C2", words="stay there", two_devices=True),
    Trial(fault="merge-third-copy", expected="third-copy", stages=_MEMORY, case="C5"),
    Trial(fault="killed", expected="lost-worker", stages=_MERGED, words="SIGKILL"),
    Trial(fault="hung", expected="lost-worker", stages=_MERGED, words="no sign of life"),
    Trial(fault="stopped", expected="lost-worker", stages=_MERGED, words="no sign of life"),
    Trial(fault="out-of-memory", expected="lost-worker", stages=_MERGED, words="out of memory"),
)


class DrillRow(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one fault.

    Attributes
    ----------
    worker : str
        Where it was planted.
    named : str or None
        Kind of the first finding about that worker; None where there is none.
    found : bool
        Whether there is any finding about that worker, and none about another.
    message : str
        That finding's sentence.
    """

    fault: str
    case: str | None
    worker: str
    expected: str
    named: str | None
    found: bool
    message: str

    @property
    def passed(self) -> bool:
        return self.found and self.named == self.expected


def choose(only: Sequence[str]) -> tuple[Trial, ...]:
    """Return the trials of these faults; where none is named, all that this machine has the devices for.

    Raises
    ------
    UsageError
        There is no such fault, or it needs more devices than there are.
    """
    known = {trial.fault: trial for trial in TRIALS}
    for name in only:
        if name not in known:
            raise UsageError(f"no such fault: {name}", where="--only", wanted=", ".join(known))
    chosen = tuple(known[name] for name in only) or TRIALS
    possible = tuple(trial for trial in chosen if not trial.two_devices or len(accelerators()) > 1)
    if only and possible != chosen:
        missing = next(trial for trial in chosen if trial not in possible)
        raise UsageError("this fault needs two accelerators", where=f"--only {missing.fault}", got=len(accelerators()))
    return possible


def drill(
    trials: Sequence[Trial],
    *,
    out: Path | None,
    watch: Watcher,
    replace: bool = False,
) -> tuple[DrillRow, ...]:
    """Run the built-in case once per trial; leave each run's report in a folder of its own.

    Parameters
    ----------
    trials : sequence of Trial
    out : Path or None
        `out/FAULT/` holds the run's report and captures; None keeps nothing.
    watch : callable
        Called with every event of every worker.
    replace : bool
        Overwrite an earlier drill's results.
    """
    rows = []
    for trial in trials:
        devices = _devices(two=trial.two_devices)
        options = Options(
            devices=tuple(info.spec.name for info in devices),
            stages=trial.stages,
            repeat=trial.repeat,
            load_paths=(LoadPath.SHARED,) if trial.two_devices else trial.load_paths,
            stall=STALL_S,
            wrapper=trial.wrapper,
        )
        worker = devices[-1].spec.name
        plan = dataclasses.replace(pipeline.prepare(options), faults={worker: trial.fault})
        folder = None if out is None else out / trial.fault
        rows.append(_row(trial, worker, pipeline.run(plan, folder, watch=watch, replace=replace).comparison))
    return tuple(rows)


def _devices(*, two: bool) -> tuple[DeviceInfo, ...]:
    """Return the reference and one other device, which gets the fault; on a bare machine the reference gets it.

    Where the fault needs two accelerators the second gets it: the first is the one that PEFT goes through by itself.
    """
    found = select(["auto"])
    if two:
        return (found[0], accelerators()[1])
    return (found[0], found[1]) if len(found) > 1 else (found[0],)


def _row(trial: Trial, worker: str, comparison: Comparison) -> DrillRow:
    # the words are part of the name: a kind alone may mean several things
    about = [f for f in comparison.findings if f.severity != "note"]
    first = next((f for f in about if f.workers == (worker,) and trial.words in f.message), None)
    return DrillRow(
        fault=trial.fault,
        case=trial.case,
        worker=worker,
        expected=trial.expected,
        named=None if first is None else first.kind,
        found=first is not None and all(f.workers == (worker,) for f in about),
        message="" if first is None else first.message,
    )
