"""What a case will take on the devices of this host, and how it is made to fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from consistency.case.budget.estimate import PlannedWorker
from consistency.case.budget.fit import Budget, make_budget
from consistency.case.budget.speed import measure_speed
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.devices.discovery import cpu_flags
from consistency.devices.memory import available_bytes
from consistency.devices.spec import DeviceInfo
from consistency.launch.plan import WorkerPlan, plan_waves


def budget_of(case: Case, devices: Sequence[DeviceInfo], *, threads: int | None = None, timed: bool = False) -> Budget:
    """Return the budget of a case; `timed` measures this host's processor for it, in a fifth of a second."""
    planned = list(_planned(plan_waves(case, devices)))
    speed = measure_speed(cpu_flags()) if timed else None
    return make_budget(case, planned, available_bytes=available_bytes(), speed=speed, threads=threads)


def _planned(waves: Sequence[Sequence[WorkerPlan]]) -> Iterator[PlannedWorker]:
    for number, wave in enumerate(waves):
        for plan in wave:
            yield PlannedWorker(
                label=plan.label,
                spec=plan.info.spec,
                device_memory_bytes=plan.info.memory_bytes,
                simulated=plan.info.simulated,
                makes_reference=plan.makes_reference,
                paths=len(plan.alternative_paths),
                sees_others=not plan.info.spec.is_cpu and plan.load_path is LoadPath.SHARED,
                wave=number,
            )
