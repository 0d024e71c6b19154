"""One case of a pytest session: the places of its items, and the part of it that the selected items need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from consistency.case.load_path import LoadPath
from consistency.case.stages import Stage
from consistency.errors import ConsistencyError
from consistency.launch.plan import WorkerPlan, plan_waves
from consistency.pytest_plugin.item_names import Place, places
from consistency.workflows.pipeline import Plan
from consistency.workflows.suite import PlannedCase


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionCase:
    """One case of a session.

    Attributes
    ----------
    number : int
        Among the cases of the session.
    plan : Plan or None
        None where the input of the case cannot be used.
    error : ConsistencyError or None
        Why it cannot be used.
    """

    number: int
    name: str
    plan: Plan | None = None
    error: ConsistencyError | None = None
    places: tuple[Place, ...] = ()
    workers: tuple[WorkerPlan, ...] = ()

    @classmethod
    def of(cls, number: int, plan: Plan) -> SessionCase:
        """Return a case with the places of its items, from headers alone."""
        workers = tuple(worker for wave in plan_waves(plan.case, plan.devices) for worker in wave)
        return cls(number=number, name=plan.case.name, plan=plan, places=places(plan.case), workers=workers)

    @classmethod
    def of_suite(cls, number: int, planned: PlannedCase) -> SessionCase:
        """Return a case of a suite, which may have no plan."""
        if planned.plan is None:
            return cls(number=number, name=planned.name, error=planned.error)
        return cls.of(number, planned.plan)

    def narrowed(self, selected: Sequence[tuple[Place, WorkerPlan]]) -> Plan:
        """Return the plan narrowed to the stages, layers and devices of the selected items; whole without any.

        Raises
        ------
        ConsistencyError
            The input of the case cannot be used.
        """
        plan = self.plan
        if plan is None:
            raise self.error or ConsistencyError("the case has no plan", where=self.name)
        if not selected:
            return plan
        chosen_places = {place for place, _ in selected}
        chosen_workers = [worker for _, worker in selected]
        names = {worker.name for worker in chosen_workers}
        maker = next(worker for worker in self.workers if worker.makes_reference)
        taken = {r for w in chosen_workers if not w.info.spec.is_cpu for r in (w.load_path, *w.alternative_paths)}
        taken = taken or {r for w in chosen_workers for r in (LoadPath.ISOLATED, *w.alternative_paths)}
        whole = len(selected) == len(self.places) * len(self.workers)
        return dataclasses.replace(
            plan,
            case=msgspec.structs.replace(
                plan.case,
                stages=tuple(s for s in plan.case.stages if any(place.stage is s for place in chosen_places)),
                load_paths=tuple(r for r in LoadPath if r in taken),
                only=() if whole else tuple(sorted({_prefix(place) for place in chosen_places})),
            ),
            devices=tuple(i for i in plan.devices if i.spec.name in names or i is maker.info),
        )


def _prefix(place: Place) -> str:
    # a layer of the base may have another name in its file than in the model, so that stage is checked as a whole
    if place.is_rest or place.stage is Stage.BASE:
        return place.stage.value
    return f"{place.stage}::{place.layer}"
