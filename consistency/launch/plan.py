"""Which workers a case needs: one per device and default road, in waves that leave a device to one process at a time.

A worker takes the side roads of its default road itself: starting one costs seconds, loading the adapter again little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from consistency.capture.folder import worker_slug
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.stages import Stage
from consistency.devices.spec import DeviceInfo
from consistency.launch.change import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker to be started.

    Attributes
    ----------
    info : DeviceInfo
    road : Road
        The default road that it is started for.
    side_roads : tuple of Road
        What it takes beside that.
    makes_reference : bool
        Whether it computes the float64 activations for all.
    change : Change or None
        What is to be different from what device and road give it.
    """

    info: DeviceInfo
    load_path: LoadPath
    alternative_paths: tuple[LoadPath, ...] = ()
    makes_reference: bool = False
    change: Change | None = None

    @property
    def name(self) -> str:
        return self.info.spec.name

    @property
    def slug(self) -> str:
        return worker_slug(self.name, self.load_path)

    @property
    def label(self) -> str:
        """Return the name for people: the road is named where it is not the usual one."""
        return self.name if self.load_path is LoadPath.ISOLATED else f"{self.name} ({self.load_path})"


def plan_waves(case: Case, devices: Sequence[DeviceInfo]) -> list[list[WorkerPlan]]:
    """Return the workers of a case, one list per default road; the next wave starts when the one before has ended.

    The CPU goes with the first wave only: no road leads past it. The worker that makes the float64 activations is the
    plain CPU where there is one.
    """
    load_paths = case.load_paths or default_load_paths(devices, sides=case.plan.sides)
    maker = _reference_maker(devices)
    waves = []
    for number, main in enumerate(dict.fromkeys(load_path.main for load_path in load_paths)):
        sides = (
            tuple(load_path for load_path in load_paths if load_path.main is main and not load_path.is_main)
            if _loads(case)
            else ()
        )
        wave = [
            WorkerPlan(
                info=info,
                load_path=LoadPath.ISOLATED if info.spec.is_cpu else main,
                alternative_paths=_on_cpu(sides, chosen=case.load_paths is not None) if info.spec.is_cpu else sides,
                makes_reference=number == 0 and info is maker,
            )
            for info in devices
            if number == 0 or not info.spec.is_cpu
        ]
        if wave:
            # started first, for the others wait for what it makes
            waves.append(sorted(wave, key=lambda plan: not plan.makes_reference))
    return waves


def default_load_paths(devices: Sequence[DeviceInfo], *, sides: Sequence[str] = ()) -> tuple[LoadPath, ...]:
    """Return the roads that a fault of the copies can be told from a fault of the device by.

    Alone on its device a worker cannot meet a broken copy between devices; with one accelerator there is no such copy.

    Parameters
    ----------
    devices : sequence of DeviceInfo
    sides : sequence of str
        What each default road is taken with beside.
    """
    accelerators = {(info.spec.type, info.spec.index) for info in devices if not info.spec.is_cpu}
    mains = (LoadPath.ISOLATED, LoadPath.SHARED) if len(accelerators) > 1 else (LoadPath.ISOLATED,)
    return tuple(
        load_path
        for load_path in LoadPath
        if load_path.main in mains and (load_path.is_main or load_path.side in sides)
    )


def _loads(case: Case) -> bool:
    return case.adapter is not None and Stage.ADAPTER in case.stages


def _on_cpu(sides: Sequence[LoadPath], *, chosen: bool) -> tuple[LoadPath, ...]:
    """Return what the CPU takes beside its default road: to name `cpu` to PEFT there is to say what it does anyway."""
    return tuple(load_path.beside(LoadPath.ISOLATED) for load_path in sides if chosen or load_path.torch_device is None)


def _reference_maker(devices: Sequence[DeviceInfo]) -> DeviceInfo:
    cpus = [info for info in devices if info.spec.is_cpu]
    native = [info for info in cpus if info.spec.variant is None]
    return (native or cpus or list(devices))[0]
