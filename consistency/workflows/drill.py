"""The drill: run the built-in case with one fault planted at a time, and check that it is found and named.

It shows users and developers that the tool detects what it claims to. Each fault goes into one worker's real loading
path; the run around it is that of `consistency run`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec

from consistency.case.builtin import BUILTIN_CASES
from consistency.case.load_path import LoadPath
from consistency.case.options import Options
from consistency.comparison.result import Comparison
from consistency.devices.discovery import accelerators, select
from consistency.devices.spec import DeviceInfo
from consistency.errors import UsageError, meant
from consistency.launch.engine import Watcher
from consistency.worker.faults.catalogue import FAULTS, Fault
from consistency.worker.protocol import Event
from consistency.workflows import pipeline
from consistency.workflows.second_adapter import several_adapters

STALL_S = 30.0  # a hung worker is given up after this; importing torch from a slow disk takes less


class DrillRow(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one fault.

    Attributes
    ----------
    worker : str
        Where it was planted.
    named : str or None
        Kind of the first finding about that worker.
    found : bool
        Whether there is a finding about that worker, and none about another.
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


class ListedFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault that can be planted; `needs` says which devices it takes, where that is more than the CPU."""

    fault: str
    case: str | None
    stages: tuple[str, ...]
    expected: str
    needs: str


def listed(only: Sequence[str]) -> tuple[ListedFault, ...]:
    """Return these faults, or all, without asking for devices."""
    return tuple(
        ListedFault(fault=one.name, case=one.case, stages=one.stages, expected=one.expected, needs=_needs(one))
        for one in _named(only)
    )


def _named(only: Sequence[str]) -> tuple[Fault, ...]:
    for name in only:
        if name not in FAULTS:
            hint = meant(name, FAULTS) or "`consistency drill --list` lists them"
            raise UsageError(f"unknown fault: {name}", where="--only", hint=hint)
    return tuple(FAULTS[name] for name in only or FAULTS)


def _needs(fault: Fault) -> str:
    return "two accelerators" if fault.two_devices else "an accelerator" if fault.accelerators else ""


def choose(only: Sequence[str]) -> tuple[Fault, ...]:
    """Return these faults; where none is named, all that this host has the devices for."""
    chosen = _named(only)
    possible = tuple(fault for fault in chosen if not fault.accelerators or len(accelerators()) >= fault.accelerators)
    if only and possible != chosen:
        missing = next(fault for fault in chosen if fault not in possible)
        raise UsageError(f"this fault needs {_needs(missing)}", where=f"--only {missing.name}", got=len(accelerators()))
    return possible


def drill(faults: Sequence[Fault], *, out: Path | None, watch: Watcher, replace: bool = False) -> tuple[DrillRow, ...]:
    """Run the built-in case once per fault; `out/FAULT/` holds the run's report and captures."""
    rows = []
    for number, fault in enumerate(faults):
        watch("", Event(at=time.time(), kind="case", message=fault.name, done=number, total=len(faults)))
        devices = _devices(two=fault.two_devices)
        options = Options(
            base=fault.base,
            devices=tuple(info.spec.name for info in devices),
            stages=fault.stages,
            repeat=fault.repeat,
            soak=fault.soak_s,
            only=fault.only,
            load_paths=(LoadPath.SHARED,) if fault.two_devices else fault.load_paths,
            stall=STALL_S,
            wrapper=fault.wrapper,
            placement="offload" if fault.offloads else "auto",
        )
        worker = devices[-1].spec.name
        folder = None if out is None else out / fault.name
        with several_adapters() if fault.several else nullcontext() as adapters:
            if adapters is not None:
                options = dataclasses.replace(options, base=f"builtin:{BUILTIN_CASES[0]}", adapters=adapters)
            prepared = pipeline.prepare(options)
            plan = dataclasses.replace(prepared, faults={worker: fault.name})
            rows.append(_row(fault, worker, pipeline.run(plan, folder, watch=watch, replace=replace).comparison))
    return tuple(rows)


def _devices(*, two: bool) -> tuple[DeviceInfo, ...]:
    """Return the reference and one other device, which gets the fault; on a bare machine the reference gets it.

    Where the fault needs two accelerators the second gets it: PEFT goes through the first by default.
    """
    found = select(["auto"])
    if two:
        return (found[0], accelerators()[1])
    return (found[0], found[1]) if len(found) > 1 else (found[0],)


def _row(fault: Fault, worker: str, comparison: Comparison) -> DrillRow:
    # the words are part of the name: one kind can have several causes
    about = [f for f in comparison.findings if f.severity != "note"]
    first = next((f for f in about if f.workers == (worker,) and fault.words in f.message), None)
    return DrillRow(
        fault=fault.name,
        case=fault.case,
        worker=worker,
        expected=fault.expected,
        named=None if first is None else first.kind,
        found=first is not None and all(f.workers == (worker,) for f in about),
        message="" if first is None else first.message,
    )
