"""Which workers a case needs: one per device and road, in waves that leave each device to one process at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from consistency.capture import worker_slug
from consistency.case import Case, Road
from consistency.device import DeviceInfo
from consistency.launch.change import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker to be started.

    Attributes
    ----------
    info : DeviceInfo
    road : Road
    makes_reference : bool
        Whether it computes the float64 activations for all.
    change : Change or None
        What is to be different from what device and road give it.
    """

    info: DeviceInfo
    road: Road
    makes_reference: bool = False
    change: Change | None = None

    @property
    def name(self) -> str:
        return self.info.spec.name

    @property
    def slug(self) -> str:
        return worker_slug(self.name, self.road)

    @property
    def label(self) -> str:
        """Return the name for people: the road is named where it is not the usual one."""
        return self.name if self.road is Road.ISOLATED else f"{self.name} ({self.road})"


def plan_waves(case: Case, devices: Sequence[DeviceInfo]) -> list[list[WorkerPlan]]:
    """Return the workers of a case, one list per road; the next wave starts when the one before has ended.

    The CPU goes with the first wave only: no road leads past it. The worker that makes the float64 activations is the
    plain CPU where there is one.
    """
    roads = case.roads or default_roads(devices)
    maker = _reference_maker(devices)
    waves = []
    for number, road in enumerate(roads):
        wave = [
            WorkerPlan(
                info=info,
                road=Road.ISOLATED if info.spec.is_cpu else road,
                makes_reference=number == 0 and info is maker,
            )
            for info in devices
            if number == 0 or not info.spec.is_cpu
        ]
        if wave:
            # started first, for the others wait for what it makes
            waves.append(sorted(wave, key=lambda plan: not plan.makes_reference))
    return waves


def default_roads(devices: Sequence[DeviceInfo]) -> tuple[Road, ...]:
    """Return the roads that a fault of the copies can be told from a fault of the device by.

    Alone on its device a worker cannot meet a broken copy between devices; with one accelerator there is no such copy.
    """
    accelerators = {(info.spec.type, info.spec.index) for info in devices if not info.spec.is_cpu}
    return tuple(Road) if len(accelerators) > 1 else (Road.ISOLATED,)


def _reference_maker(devices: Sequence[DeviceInfo]) -> DeviceInfo:
    cpus = [info for info in devices if info.spec.is_cpu]
    native = [info for info in cpus if info.spec.variant is None]
    return (native or cpus or list(devices))[0]
