"""What a case will take on the devices of this host, and how it is made to fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from consistency.case.budget.estimate import PlannedWorker
from consistency.case.budget.fit import Budget, make_budget
from consistency.case.budget.speed import Speed, measure_speed
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.preflight import prepare_case
from consistency.case.suite import SuiteOptions
from consistency.devices.discovery import cpu_flags
from consistency.devices.memory import available_bytes
from consistency.devices.spec import DeviceInfo
from consistency.errors import InputError
from consistency.launch.plan import WorkerPlan, plan_waves


def host_speed() -> Speed:
    """Measure this host's processor, in a quarter of a second."""
    return measure_speed(cpu_flags())


def budget_of(
    case: Case, devices: Sequence[DeviceInfo], *, threads: int | None = None, speed: Speed | None = None
) -> Budget:
    """Return the budget of a case on these devices of this host; without its `speed` no time is estimated."""
    planned = list(_planned(plan_waves(case, devices)))
    return make_budget(case, planned, available_bytes=available_bytes(), speed=speed, threads=threads)


def budgets_of(suite: SuiteOptions, devices: Sequence[DeviceInfo], speed: Speed) -> dict[str, Budget | InputError]:
    """Return the budget of every case of a suite by name, or why it cannot be checked."""
    found: dict[str, Budget | InputError] = {}
    for options in suite.cases:
        try:
            case = prepare_case(options)
            found[case.name] = budget_of(case, devices, threads=suite.shared.threads, speed=speed)
        except InputError as error:
            found[str(options.name)] = error
    return found


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
