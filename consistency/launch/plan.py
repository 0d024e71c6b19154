"""Which workers a case needs: one per device and default load path, in waves, so that each device has one process.

A worker takes the alternatives of its default load path itself: starting a worker costs seconds, loading the adapter
again costs little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from consistency.capture.folder import worker_slug
from consistency.case import standard
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.devices.spec import DeviceInfo
from consistency.launch.change import Change

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker to be started."""

    info: DeviceInfo
    load_path: LoadPath
    """The default load path that it is started for."""
    alternative_paths: tuple[LoadPath, ...] = ()
    makes_reference: bool = False
    """Whether it computes the float64 activations for all workers."""
    others_wait: bool = True
    """Whether the case has any other."""
    peers: tuple[DeviceInfo, ...] = ()
    """The devices of these."""
    change: Change | None = None
    turn: int = 0
    """Which of the workers on its card it is: they run one after the other."""

    @property
    def name(self) -> str:
        return self.info.spec.name

    @property
    def slug(self) -> str:
        return worker_slug(self.name, self.load_path)

    def settings(self, case: Case) -> dict[str, Any]:
        """Return the settings that differ from the profile's: the user's, the variant's, and those of the change."""
        return {**settings_of(self.info, case), **({} if self.change is None else self.change.settings)}

    @property
    def label(self) -> str:
        """Return the name for people: the load path is named where it is not the default."""
        return self.name if self.load_path is LoadPath.ISOLATED else f"{self.name} ({self.load_path})"


def settings_of(info: DeviceInfo, case: Case) -> dict[str, Any]:
    """Return the settings that a case asks a device for."""
    variant = info.spec.numerical_variant()
    chosen = {switch.name: switch.value for switch in case.settings}
    return chosen if variant is None else {**chosen, **variant.settings}


def plan_waves(case: Case, devices: Sequence[DeviceInfo]) -> list[list[WorkerPlan]]:
    """Return the workers of a case in waves; the next one starts when the one before has ended.

    There is a wave for each default load path, and one more for each further variant of a card: two of them would share
    its memory, which each takes for its own. The CPU is in the first wave only, because it has one default load path.
    The plain CPU computes the float64 activations where there is one.
    """
    load_paths = case.load_paths or default_load_paths(devices, sides=case.plan.sides)
    loads = case.adapter is not None and standard.ADAPTER in case.stages
    maker = min(devices, key=lambda info: (not info.spec.is_cpu, info.spec.is_cpu and info.spec.variant is not None))
    turns = _turns(devices)
    waves = []
    chosen = {load_path.main for load_path in load_paths}
    for number, main in enumerate(path for path in LoadPath if path in chosen):
        sides = tuple(path for path in load_paths if loads and path.main is main and not path.is_main)
        found = [
            WorkerPlan(
                info=info,
                load_path=LoadPath.ISOLATED if info.spec.is_cpu else main,
                alternative_paths=_on_cpu(sides, chosen=case.load_paths is not None) if info.spec.is_cpu else sides,
                makes_reference=number == 0 and info is maker,
                peers=tuple(devices) if number == 0 and info is maker else (),
                turn=turns[info.spec.name],
            )
            for info in devices
            if number == 0 or not info.spec.is_cpu
        ]
        for turn in sorted({plan.turn for plan in found}):
            # started first, because the others wait for its result
            wave = [plan for plan in found if plan.turn == turn]
            waves.append(sorted(wave, key=lambda plan: not plan.makes_reference))
    alone = sum(map(len, waves)) == 1
    return [[replace(plan, others_wait=not alone) for plan in wave] for wave in waves]


def merged_waves(
    cases: Sequence[Sequence[Sequence[WorkerPlan]]], keys: Sequence[object] = ()
) -> list[list[list[tuple[int, WorkerPlan]]]]:
    """Return the processes that take several cases in turn, in waves, from the waves of each case.

    There is one process per device and default load path; each is a list of the cases that need it, by number, with
    the worker that it is for them. Every process takes them in the same order, so that none waits for a reference that
    is made only after it has ended. Cases with different `keys` share no process, and run one after the other: a device
    has one process at a time.
    """
    plans = [(number, plan) for number, waves in enumerate(cases) for wave in waves for plan in wave]
    chosen = {plan.load_path.main for _, plan in plans if not plan.info.spec.is_cpu}
    order = [path for path in LoadPath if path in chosen] or [LoadPath.ISOLATED]
    different = list(dict.fromkeys(keys)) or [None]
    turns = sorted({plan.turn for _, plan in plans})
    merged: dict[tuple[object, LoadPath, int], dict[str, list[tuple[int, WorkerPlan]]]]
    merged = {(key, path, turn): {} for key in different for path in order for turn in turns}
    for number, plan in plans:
        path = order[0] if plan.info.spec.is_cpu else plan.load_path.main
        merged[keys[number] if keys else None, path, plan.turn].setdefault(plan.slug, []).append((number, plan))
    return [list(wave.values()) for wave in merged.values() if wave]


def side_by_side(waves: Sequence[Sequence[T]], at_once: int | None) -> list[Sequence[T]]:
    """Split waves so that no more than `at_once` workers run side by side; the order stays."""
    sizes = [(wave, at_once or max(1, len(wave))) for wave in waves]
    return [wave[start : start + size] for wave, size in sizes for start in range(0, len(wave), size)]


def in_lanes(queues: Sequence[Sequence[T]], lanes: int, *, of: Callable[[T], int]) -> list[list[T]]:
    """Split the queues of a wave so that so many cases run side by side; `of` tells a case's number.

    All workers of a case are in one lane, each of which takes its cases in their order: none waits for a case that a
    lane has not begun and never will.
    """
    numbers = sorted({of(one) for queue in queues for one in queue})
    lane = {number: place % lanes for place, number in enumerate(numbers)}
    split = [[one for one in queue if lane[of(one)] == here] for here in range(lanes) for queue in queues]
    return [queue for queue in split if queue]


def default_load_paths(devices: Sequence[DeviceInfo], *, sides: Sequence[str] = ()) -> tuple[LoadPath, ...]:
    """Return the load paths that separate a faulty copy from a faulty device, each with the alternatives `sides`.

    A worker that sees only its own device cannot hit a broken copy between devices; one accelerator has no such copy.
    """
    several = has_several(devices) and not why_not_shared(devices)
    mains = (LoadPath.ISOLATED, LoadPath.SHARED) if several else (LoadPath.ISOLATED,)
    return tuple(path for path in LoadPath if path.main in mains and (path.is_main or path.side in sides))


def has_several(devices: Sequence[DeviceInfo]) -> bool:
    """Return whether there is more than one accelerator, whatever its variants."""
    return len({(info.spec.type, info.spec.index) for info in devices if not info.spec.is_cpu}) > 1


def why_not_shared(devices: Sequence[DeviceInfo]) -> str:
    """Return why no process can see all of several devices; empty where one can."""
    found = [info for info in devices if info.alone] if has_several(devices) else []
    return f"{found[0].spec.name}, {found[0].alone}" if found else ""


def _turns(devices: Sequence[DeviceInfo]) -> dict[str, int]:
    """Return how many variants of its card come before each device; those of the CPU run side by side."""
    before: Counter[str] = Counter()
    found = {}
    for info in devices:
        # partitions of one AMD card may share its UUID, and not the function of its PCI address
        card = f"{info.uuid} {info.pci_bus_id}" if info.uuid else f"{info.spec.type}:{info.spec.index}"
        found[info.spec.name] = 0 if info.spec.is_cpu else before[card]
        before[card] += 1
    return found


def _on_cpu(sides: Sequence[LoadPath], *, chosen: bool) -> tuple[LoadPath, ...]:
    """Return the alternatives for the CPU: naming the device there changes nothing, so only if it was chosen."""
    return tuple(load_path.beside(LoadPath.ISOLATED) for load_path in sides if chosen or load_path.torch_device is None)
