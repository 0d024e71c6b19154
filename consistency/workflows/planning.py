"""The memory that a case takes on the devices of this host, and how it is made to fit."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from consistency.case.budget.estimate import PlannedWorker
from consistency.case.budget.fit import MARGIN, Budget, make_budget
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.stage import Level
from consistency.case.stages import HOST_STAGES, MODEL_LESS, SPECS, requested
from consistency.case.suite import SuiteOptions
from consistency.devices.backends import backend_of
from consistency.devices.cores import threads_per_worker
from consistency.devices.memory import available_bytes, is_in_memory
from consistency.devices.spec import DeviceInfo
from consistency.errors import ConsistencyError, InputError, UsageError
from consistency.launch.environment import worker_threads
from consistency.launch.plan import WorkerPlan, plan_waves, why_not_shared


def budget_of(case: Case, devices: Sequence[DeviceInfo]) -> Budget:
    """Return the budget of a case on these devices of this host."""
    case = _fit_to_devices(case, devices)
    workers = list(_planned_workers(plan_waves(case, devices)))
    return make_budget(case, workers, available_bytes=available_bytes())


def budgets_of(suite: SuiteOptions, devices: Sequence[DeviceInfo]) -> dict[str, Budget | ConsistencyError]:
    """Return the budget of every case of a suite by name, or why it cannot be checked, which does not stop others."""
    budgets: dict[str, Budget | ConsistencyError] = {}
    host_checked_by: dict[object, str] = {}
    for options in suite.cases:
        name = str(options.name)
        try:
            case = _without_host_stages(prepare_case(options), options, host_checked_by)
            budget = budgets[name] = budget_of(case, devices)
        except (InputError, UsageError) as error:
            budgets[name] = error
            continue
        # a case that is not run cannot check the host for the others
        if budget.refusal is None and _checks_host(budget.case):
            host_checked_by.setdefault(_host_key(budget.case), name)
    return budgets


MOST_CASES_AT_ONCE = 6
"""One process compares all cases and writes their reports. With a thousand small cases it took half of the processor
time at level `quick`, where more lanes would wait for it, and a sixteenth at `standard`, where more would have some
use. Six is a choice between these; measured with two lanes alone."""


def cases_at_once(
    suite: SuiteOptions, devices: Sequence[DeviceInfo], budgets: Mapping[str, Budget | ConsistencyError]
) -> int:
    """Return how many cases of a suite run side by side: as many as there are cores and memory for.

    A case keeps about one core busy: a small model computes no faster with a second thread, and the other workers wait
    for the one that makes the reference. An accelerator has one process at a time; threads that were asked for, and a
    soak, have the processor to themselves.
    """
    at_once = _lanes(suite, devices)
    for budget in budgets.values():
        if isinstance(budget, Budget) and budget.refusal is None:
            fitting = that_fit(budget)
            if fitting is not None:
                at_once = min(at_once, fitting)
    return max(1, at_once)


def that_fit(budget: Budget) -> int | None:
    """Return how many cases like this fit the host's memory side by side; None where its memory is unknown."""
    available = budget.host_available_bytes
    if available is None:
        return None
    return int(available / (MARGIN * budget.host_private_bytes))


def _lanes(suite: SuiteOptions, devices: Sequence[DeviceInfo]) -> int:
    """Return how many cases of a suite there are cores for."""
    if suite.shared.threads is not None or not all(info.spec.is_cpu for info in devices):
        return 1
    if any(options.soak is not None for options in suite.cases):
        return 1
    # with fewer than two cases for each lane, the last one runs alone too long
    return max(1, min(MOST_CASES_AT_ONCE, _cores(devices), len(suite.cases) // 2))


def _cores(devices: Sequence[DeviceInfo]) -> int:
    """Return how many cores the workers of a single case may use."""
    return min(threads_per_worker(1), len(devices) * _threads(devices))


def _threads(devices: Sequence[DeviceInfo]) -> int:
    """Return the threads of one worker of the CPU, where these devices share the cores."""
    return worker_threads(None, threads_per_worker(len(devices))) or 1


def _fit_to_devices(case: Case, devices: Sequence[DeviceInfo]) -> Case:
    """Return a case with the reason why its workers cannot see all devices, where they cannot.

    At level `thorough`, a case on two equal cards gets the stages of what cards do together, unless the user has chosen
    the stages.

    Raises
    ------
    UsageError
        The user has chosen a load path on which the workers see all devices, and they cannot.
    """
    reason = why_not_shared(devices)
    if case.load_paths is not None:
        if reason and any(path.main is LoadPath.SHARED for path in case.load_paths):
            raise UsageError("the workers cannot see all devices", where="--load-paths", got=reason, wanted="isolated")
        # the user chose the load paths, so none of them is left out for that reason
        case = msgspec.structs.replace(case, not_shared="")
    else:
        case = msgspec.structs.replace(case, not_shared=reason)
    of_level = set(requested(case.level, case))
    # without options a case has all stages of its level, or, where only the host is checked, those without a model
    has_default_stages = set(case.stages) in (of_level, of_level & set(MODEL_LESS))
    if not has_default_stages or case.level is not Level.THOROUGH:
        return case
    if reason or not _are_two_equal(devices):
        return case
    stages = tuple(stage for stage, spec in SPECS.items() if stage in case.stages or spec.with_equal_cards)
    return msgspec.structs.replace(case, stages=stages)


def _are_two_equal(devices: Sequence[DeviceInfo]) -> bool:
    """Return whether two cards are of the same model, and their type has a library of collective operations."""
    # by index, since the variants of a card are one card; what is simulated is none
    cards = {info.spec.index: info for info in devices if backend_of(info.spec.type).of_collectives}
    real_cards = [info for info in cards.values() if not info.simulated]
    kinds = Counter((info.spec.type, info.architecture, info.model) for info in real_cards)
    return max(kinds.values(), default=0) > 1


def _host_key(case: Case) -> object:
    """Return what the results of stages that need no model depend on."""
    return case.process_key, case.level


def _checks_host(case: Case) -> bool:
    """Return whether a case has every stage of its level that checks the host alone."""
    return set(HOST_STAGES) & set(case.plan.stages) <= set(case.stages)


def _without_host_stages(case: Case, options: Options, host_checked_by: Mapping[object, str]) -> Case:
    """Leave the stages that check the host alone to the first case, unless they were asked for by name.

    `host_checked_by` has the names of cases that run these stages, by `_host_key`.
    """
    first_case = host_checked_by.get(_host_key(case))
    if first_case is None or options.stages is not None:
        return case
    stages = tuple(stage for stage in case.stages if stage not in HOST_STAGES)
    return msgspec.structs.replace(case, stages=stages, host_checked_by=first_case)


def _planned_workers(waves: Sequence[Sequence[WorkerPlan]]) -> Iterator[PlannedWorker]:
    """Yield the workers of a case as its budget counts them."""
    scratch_in_memory = is_in_memory(Path(tempfile.gettempdir()))  # where `launch.local` has its scratch folder
    for number, wave in enumerate(waves):
        for plan in wave:
            yield PlannedWorker(
                label=plan.label,
                spec=plan.info.spec,
                device_memory_bytes=plan.info.memory_bytes,
                simulated=plan.info.simulated,
                shares_memory=plan.info.shares_memory,
                makes_reference=plan.makes_reference,
                sees_others=not plan.info.spec.is_cpu and plan.load_path is LoadPath.SHARED,
                wave=number,
                scratch_in_memory=scratch_in_memory,
            )
