"""Which workers a case needs: one per device and default load path, in waves, so that each device has one process.

A worker takes the alternatives of its default load path itself: starting a worker costs seconds, loading the adapter
again costs little.
"""

from __future__ import annotations

import itertools
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
    """Whether the case has any other worker, which waits for the reference."""
    peers: tuple[DeviceInfo, ...] = ()
    """The devices of all workers, for the one that makes the reference."""
    change: Change | None = None
    turn: int = 0
    """How many variants of its card come before it: they run one after the other."""

    @property
    def name(self) -> str:
        """The name of the device."""
        return self.info.spec.name

    @property
    def slug(self) -> str:
        """The name of the worker's folder in a capture."""
        return worker_slug(self.name, self.load_path)

    def settings(self, case: Case) -> dict[str, Any]:
        """Return the settings that the user, the variant or the change sets in place of the profile's."""
        settings = settings_of(self.info, case)
        if self.change is not None:
            settings = {**settings, **self.change.settings}
        return settings

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
    chosen = {load_path.main for load_path in load_paths}
    mains = [path for path in LoadPath if path in chosen]
    maker = min(devices, key=_rank_as_maker)
    turns = _turns(devices)
    waves: list[list[WorkerPlan]] = []
    for main in mains:
        is_first = main is mains[0]
        sides = _alternatives(case, load_paths, main)
        plans = []
        for info in devices:
            # the CPU has one default load path
            if info.spec.is_cpu and not is_first:
                continue
            makes_reference = is_first and info is maker
            peers = tuple(devices) if makes_reference else ()
            load_path, alternatives = main, sides
            if info.spec.is_cpu:
                load_path = LoadPath.ISOLATED
                alternatives = _on_cpu(sides, chosen=case.load_paths is not None)
            plans.append(
                WorkerPlan(
                    info=info,
                    load_path=load_path,
                    alternative_paths=alternatives,
                    makes_reference=makes_reference,
                    peers=peers,
                    turn=turns[info.spec.name],
                )
            )
        waves += _by_turn(plans)
    is_alone = sum(map(len, waves)) == 1
    if is_alone:
        waves = [[replace(waves[0][0], others_wait=False)]]
    return waves


def _rank_as_maker(info: DeviceInfo) -> int:
    """Return a device's rank among those that may make the reference: the plain CPU, its variants, all others."""
    if not info.spec.is_cpu:
        return 2
    return 0 if info.spec.variant is None else 1


def _alternatives(case: Case, load_paths: Sequence[LoadPath], main: LoadPath) -> tuple[LoadPath, ...]:
    """Return the alternatives of a default load path; a case that does not load an adapter has none."""
    if case.adapter is None or standard.ADAPTER not in case.stages:
        return ()
    return tuple(path for path in load_paths if path.main is main and not path.is_main)


def _by_turn(plans: Sequence[WorkerPlan]) -> list[list[WorkerPlan]]:
    """Split the workers of a default load path into waves by their turns."""
    waves = []
    for turn in sorted({plan.turn for plan in plans}):
        wave = [plan for plan in plans if plan.turn == turn]
        # the maker of the reference is started first, because the others wait for its result
        waves.append(sorted(wave, key=lambda plan: not plan.makes_reference))
    return waves


def merged_waves(
    cases: Sequence[Sequence[Sequence[WorkerPlan]]], keys: Sequence[object] = ()
) -> list[list[list[tuple[int, WorkerPlan]]]]:
    """Merge the waves of several cases into waves of processes that take these cases in turn.

    There is one process per device and default load path; each is a list of the cases that need it, by number, with
    the worker that it is for them. Every process takes them in the same order, so that none waits for a reference that
    is made only after it has ended. Cases with different `keys` share no process, and run one after the other: a device
    has one process at a time.
    """
    plans: list[tuple[int, WorkerPlan]] = []
    for number, waves in enumerate(cases):
        plans += [(number, plan) for plan in itertools.chain.from_iterable(waves)]
    chosen = {plan.load_path.main for _, plan in plans if not plan.info.spec.is_cpu}
    load_paths = [path for path in LoadPath if path in chosen] or [LoadPath.ISOLATED]
    different_keys = list(dict.fromkeys(keys)) or [None]
    turns = sorted({plan.turn for _, plan in plans})
    # all waves in their order, before any has a worker
    merged: dict[tuple[object, LoadPath, int], dict[str, list[tuple[int, WorkerPlan]]]]
    merged = {wave: {} for wave in itertools.product(different_keys, load_paths, turns)}
    for number, plan in plans:
        # the CPU has one default load path: its workers run beside the first one of the others
        key = keys[number] if keys else None
        path = load_paths[0] if plan.info.spec.is_cpu else plan.load_path.main
        merged[key, path, plan.turn].setdefault(plan.slug, []).append((number, plan))
    return [list(processes.values()) for processes in merged.values() if processes]


def side_by_side(waves: Sequence[Sequence[T]], at_once: int | None) -> list[Sequence[T]]:
    """Split waves so that no more than `at_once` workers run side by side; the order stays."""
    split: list[Sequence[T]] = []
    for wave in waves:
        size = at_once or max(1, len(wave))
        split += [wave[start : start + size] for start in range(0, len(wave), size)]
    return split


def in_lanes(queues: Sequence[Sequence[T]], lanes: int, *, of: Callable[[T], int]) -> list[list[T]]:
    """Split the queues of a wave so that at most `lanes` cases run side by side; `of` tells a case's number.

    All workers of a case are in one lane, each of which takes its cases in their order: none waits for a case that a
    lane has not begun and never will.
    """
    numbers = sorted({of(turn) for turn in itertools.chain.from_iterable(queues)})
    lane_of_case = {number: place % lanes for place, number in enumerate(numbers)}
    split: list[list[T]] = []
    for lane in range(lanes):
        for queue in queues:
            turns = [turn for turn in queue if lane_of_case[of(turn)] == lane]
            if turns:
                split.append(turns)
    return split


def default_load_paths(devices: Sequence[DeviceInfo], *, sides: Sequence[str] = ()) -> tuple[LoadPath, ...]:
    """Return the load paths that separate a faulty copy from a faulty device, each with the alternatives `sides`.

    A worker that sees only its own device cannot hit a broken copy between devices; one accelerator has no such copy.
    """
    mains = [LoadPath.ISOLATED]
    if has_several(devices) and not why_not_shared(devices):
        mains.append(LoadPath.SHARED)
    return tuple(path for path in LoadPath if path.main in mains and (path.is_main or path.side in sides))


def has_several(devices: Sequence[DeviceInfo]) -> bool:
    """Return whether there is more than one accelerator, whatever its variants."""
    cards = {(info.spec.type, info.spec.index) for info in devices if not info.spec.is_cpu}
    return len(cards) > 1


def why_not_shared(devices: Sequence[DeviceInfo]) -> str:
    """Return why no process can see all of several devices; empty where one can."""
    if not has_several(devices):
        return ""
    unshared = next((info for info in devices if info.alone), None)
    return f"{unshared.spec.name}, {unshared.alone}" if unshared else ""


def _turns(devices: Sequence[DeviceInfo]) -> dict[str, int]:
    """Return by device how many variants of the same card come before it; variants of the CPU run side by side."""
    before: Counter[str] = Counter()
    turns = {}
    for info in devices:
        card = f"{info.spec.type}:{info.spec.index}"
        if info.uuid:
            # partitions of one AMD card may share its UUID, and not the function of its PCI address
            card = f"{info.uuid} {info.pci_bus_id}"
        turns[info.spec.name] = 0 if info.spec.is_cpu else before[card]
        before[card] += 1
    return turns


def _on_cpu(sides: Sequence[LoadPath], *, chosen: bool) -> tuple[LoadPath, ...]:
    """Return the alternatives for the CPU: naming the device there changes nothing, so only if it was chosen."""
    return tuple(load_path.beside(LoadPath.ISOLATED) for load_path in sides if chosen or load_path.torch_device is None)
